"""read_keys(): the tenants of a cluster, with the hashes of their keys and the names in their certificates, from YAML.

    tenants:
      - name: search
        keys: ["sha256:9f86d0…"]        # `coatcheck keys new search` prints a key and adds its hash here
        certificates: ["cn:search"]     # or uri:, email:, dns: and a name, as the client's certificate has it
        role: user                      # user, monitor or admin
        max_streams: 64

A key is 32 random bytes, so a plain hash of it tells nothing; the file holds no secret.
"""

import dataclasses
import difflib
import hashlib
import re
from pathlib import Path
from typing import Any, Final

import yaml

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.client_certificate import FORMS
from coatcheck.router.access.tenant import Tenant

_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS: Final = {field.name: field.type for field in dataclasses.fields(Tenant)}
_WHOLE: Final = {"priority", "max_streams", "max_prompt_tokens"}
_LISTS: Final = ("keys", "certificates")
_NUMBERS: Final = {"weight", "requests_per_minute", "tokens_per_minute"}


def hash_key(key: str) -> str:
    """What the file has in the place of a key."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def read_keys(file: str) -> dict[str, Tenant]:
    """Tenants by the hashes of their keys, and by the names in their certificates.

    Raises InvalidConfig, which never quotes what may be a secret.
    """
    try:
        loaded = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise InvalidConfig(f"the keys file {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise InvalidConfig(f"the keys file {file} is not YAML{f' (line {where.line + 1})' if where else ''}") from None
    if not isinstance(loaded, dict) or loaded.keys() != {"tenants"} or not isinstance(loaded["tenants"], list):
        raise InvalidConfig(f"the keys file {file} must hold one list, `tenants`")
    if not loaded["tenants"]:
        raise InvalidConfig(f"the keys file {file} has no tenant, so that nobody could come in; add one")
    found: dict[str, Tenant] = {}
    names: set[str] = set()
    for index, entry in enumerate(loaded["tenants"]):
        try:
            tenant, keys = _tenant(entry)
            if tenant.name in names:
                raise InvalidConfig(f"tenant {tenant.name!r} is there twice; give it several keys instead")
            names.add(tenant.name)
            for key in keys:
                if key in found:
                    what = "a key" if _HASH.fullmatch(key) else f"the certificate {key!r}"
                    raise InvalidConfig(f"tenant {tenant.name!r} has {what} of {found[key].name!r}; make another")
                found[key] = tenant
        except InvalidConfig as error:
            raise InvalidConfig(f"the keys file {file}, tenant {index + 1}: {error}") from None
    return found


def _tenant(entry: Any) -> tuple[Tenant, list[str]]:
    if not isinstance(entry, dict):
        raise InvalidConfig("it must hold settings, one `name: value` a line")
    settings = dict(entry)
    keys = settings.pop("keys", [])
    certificates = settings.pop("certificates", [])
    for name, value in settings.items():
        if name not in _FIELDS:
            near = difflib.get_close_matches(str(name), [*_FIELDS, *_LISTS], n=1)
            raise InvalidConfig(
                f"unknown setting {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known are {_known()}")
            )
        if not _is_of_its_kind(name, value):
            kind = "a whole number" if name in _WHOLE else "a number" if name in _NUMBERS else "a text"
            raise InvalidConfig(f"{name} is {value!r}; it must be {kind}")
    if "name" not in settings:
        raise InvalidConfig("name is missing")
    if not isinstance(certificates, list) or not all(_is_certificate(name) for name in certificates):
        forms = ", ".join(f"{form}:NAME" for form in FORMS)
        raise InvalidConfig(f"certificates must be a list of names as clients' certificates have them: {forms}")
    known = isinstance(keys, list) and all(isinstance(key, str) and _HASH.fullmatch(key) for key in keys)
    if not known or not (keys or certificates):
        # What stands there may be a key itself, so it is not shown.
        raise InvalidConfig("keys must be a list of at least one sha256:HEX, as `coatcheck keys new` prints them")
    names = [name.lower() if name.startswith("dns:") else name for name in certificates]
    return Tenant(**{"salt": settings["name"], **settings}), [*keys, *names]


def _is_certificate(name: object) -> bool:
    form, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    return form in FORMS and bool(rest)


def _is_of_its_kind(name: str, value: object) -> bool:
    if name in _WHOLE:
        return isinstance(value, int) and not isinstance(value, bool)
    if name in _NUMBERS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str)


def _known() -> str:
    return ", ".join([*_LISTS, *_FIELDS])
