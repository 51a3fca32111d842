"""`coatcheck keys`: makes keys for tenants. A key is shown once; the file that a router reads has only its hash."""

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.key_file import hash_key, read_keys
from coatcheck.router.access.tenant import Tenant
from coatcheck.workers.host.safe_files import create_file

_PREFIX: Final = "cc-"  # so that scanners for leaked secrets, and people, know one when they see it
_BYTES: Final = 32


def keys(
    action: Annotated[Literal["new"], typer.Argument(help="new: make a key.")],
    tenant: Annotated[str, typer.Argument(help="Whose it is; a tenant that has keys gets one more.")],
    file: Annotated[Path, typer.Option(help="The file that `coatcheck serve --api-keys` reads.")] = Path("keys.yaml"),
    role: Annotated[
        str | None, typer.Option(help="Of a new tenant: user (default) generates, monitor looks, admin does all.")
    ] = None,
) -> None:
    """Make a key for TENANT, print it once, and put its hash into the file; running routers find it there."""
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    _add(file.expanduser(), tenant, hash_key(key), role)
    print(key)
    print(f"{tenant}'s key, shown this once; {file} has its hash", file=sys.stderr)


def _add(file: Path, name: str, hashed: str, role: str | None) -> None:
    import yaml

    tenants: list[dict[str, Any]] = []
    if file.exists():
        read_keys(str(file))  # what is wrong there is not for us to mend
        tenants = yaml.safe_load(file.read_text())["tenants"]
    entry = next((entry for entry in tenants if entry["name"] == name), None)
    if entry is not None and role is not None and role != entry.get("role", "user"):
        raise InvalidConfig(f"{name!r} is there with the role {entry.get('role', 'user')}; change it in {file}")
    if entry is None:
        Tenant(name, role=role or "user")  # says what is wrong with it
        entry = {"name": name, "role": role or "user", "keys": []}
        tenants.append(entry)
    entry.setdefault("keys", []).append(hashed)
    # A router may read at any moment: it finds the old file or the new one. Comments do not survive.
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(create_file(made, mode=0o666), "w") as output:
            output.write(yaml.safe_dump({"tenants": tenants}, sort_keys=False))
        made.replace(file)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise InvalidConfig(f"{file}: {error.strerror or error}") from None
