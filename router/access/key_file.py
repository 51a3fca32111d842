"""read_keys(): the tenants of a cluster, with the hashes of their keys and the names in their certificates, from YAML.

    tenants:
      - name: search
        keys: ["sha256:9f86d0…"]        # `coatcheck keys new search` prints a key and adds its hash here
        certificates: ["cn:search"]     # or uri:, email:, dns: and a name, as the client's certificate has it
        role: user                      # user, monitor or admin
        max_streams: 64

A key is 32 random bytes, so a plain hash does not reveal it: the file holds no secret. Error messages never show what
stands in the place of a hash, because it may be a key.
"""

import dataclasses
import difflib
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from cryptography import x509
from cryptography.x509.oid import NameOID
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass
from pydantic_core import ErrorDetails

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.tenant import Tenant

_FORMS: Final = ("uri", "email", "dns", "cn")
_PEM: Final = b"-----BEGIN"
_STRICT: Final = ConfigDict(extra="forbid", strict=True)
_KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
_CertificateName = Annotated[
    str,
    Field(pattern=rf"^({'|'.join(_FORMS)}):(.|\n)+$"),
    AfterValidator(lambda name: name.lower() if name.startswith("dns:") else name),
]


@validated_dataclass(frozen=True, config=_STRICT)
class _TenantEntry(Tenant):
    keys: list[_KeyHash] = dataclasses.field(default_factory=list)
    certificates: list[_CertificateName] = dataclasses.field(default_factory=list)


class _KeyFile(BaseModel):
    model_config = _STRICT

    tenants: list[_TenantEntry]


def hash_key(key: str) -> str:
    """The hash that the file has for `key`."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@lru_cache(maxsize=1024)
def certificate_names(certificate: bytes) -> tuple[str, ...]:
    """The names of a client's certificate in DER or PEM, as the file writes them, in the order of _FORMS; none if it
    cannot be read. The TLS handshake has checked before that the configured authority signed the certificate.

        uri:spiffe://cluster/ns/search    email:me@example.org    dns:search.example.org    cn:search
    """
    try:
        load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
        leaf = load(certificate)
        attributes = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        common_names = [f"cn:{attribute.value}" for attribute in attributes if isinstance(attribute.value, str)]
        try:
            alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return tuple(common_names)
        return (
            *(f"uri:{name}" for name in alternatives.get_values_for_type(x509.UniformResourceIdentifier)),
            *(f"email:{name}" for name in alternatives.get_values_for_type(x509.RFC822Name)),
            *(f"dns:{name.lower()}" for name in alternatives.get_values_for_type(x509.DNSName)),
            *common_names,
        )
    except ValueError:  # includes DuplicateExtension
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTenants:
    """The tenants by the hashes of their keys, and by the names in their certificates."""

    by_key_hash: dict[str, Tenant] = dataclasses.field(default_factory=dict)
    by_certificate: dict[str, Tenant] = dataclasses.field(default_factory=dict)


def read_keys(file: str) -> KnownTenants:
    """The tenants of a key file. Raises InvalidConfig."""
    try:
        loaded = yaml.safe_load(Path(file).read_text())
        if not isinstance(loaded, dict) or loaded.keys() != {"tenants"} or not isinstance(loaded["tenants"], list):
            raise InvalidConfig("it must hold one list, `tenants`")
        entries = [{"salt": one["name"], **one} if "name" in one else one for one in map(_settings, loaded["tenants"])]
        # As JSON, because strict validation of Python values takes instances of a dataclass only.
        return _known_tenants(_KeyFile.model_validate_json(json.dumps({"tenants": entries}, default=str)).tenants)
    except OSError as error:
        remedy = f"; `coatcheck keys new NAME --file {file}` makes it" if isinstance(error, FileNotFoundError) else ""
        raise InvalidConfig(f"the key file {file}: {error.strerror or error}{remedy}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise InvalidConfig(f"the key file {file} is not YAML{f' (line {where.line + 1})' if where else ''}") from None
    except ValidationError as error:
        raise InvalidConfig(f"the key file {file}, {_explain(error.errors()[0])}") from None
    except InvalidConfig as error:
        raise InvalidConfig(f"the key file {file}: {error}") from None


def _settings(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise InvalidConfig("an entry of `tenants` must hold settings, one `name: value` a line")
    return entry


def _known_tenants(entries: list[_TenantEntry]) -> KnownTenants:
    if not entries:
        raise InvalidConfig("`tenants` is empty, so no client would be accepted; add a tenant")
    known = KnownTenants()
    names: set[str] = set()
    for entry in entries:
        tenant = Tenant(**{field.name: getattr(entry, field.name) for field in dataclasses.fields(Tenant)})
        if tenant.name in names:
            raise InvalidConfig(f"tenant {tenant.name!r} occurs twice; give it several keys instead")
        names.add(tenant.name)
        if not entry.keys and not entry.certificates:
            raise InvalidConfig(f"tenant {tenant.name!r} has neither keys nor certificates; {_KEYS}")
        for key_hash in entry.keys:
            if other := known.by_key_hash.get(key_hash):
                raise InvalidConfig(f"tenant {tenant.name!r} has a key of {other.name!r}; make another")
            known.by_key_hash[key_hash] = tenant
        for name in entry.certificates:
            if other := known.by_certificate.get(name):
                raise InvalidConfig(
                    f"tenant {tenant.name!r} has the certificate {name!r} of {other.name!r}; make another"
                )
            known.by_certificate[name] = tenant
    return known


_KEYS: Final = "keys must be a list of at least one sha256:HEX, as `coatcheck keys new` prints them"
_CERTIFICATES: Final = "certificates must be a list of names as clients' certificates have them: " + ", ".join(
    f"{form}:NAME" for form in _FORMS
)


def _explain(error: ErrorDetails) -> str:
    _, index, setting, *_ = (*error["loc"], "")
    where = f"tenant {int(index) + 1}: "
    if setting in ("keys", "certificates"):
        return where + (_KEYS if setting == "keys" else _CERTIFICATES)
    if error["type"] == "missing":
        return f"{where}{setting} is missing"
    if error["type"] == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(_TenantEntry)]
        near = difflib.get_close_matches(str(setting), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"{where}unknown setting {setting!r}; {hint}"
    return f"{where}{setting} is {error['input']!r}; {error['msg'].replace('Input should', 'it must')}"
