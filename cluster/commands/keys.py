"""`coatcheck keys`: makes API keys for tenants. A key is printed once; the routers' key file holds only its hash."""

import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.key_file import hash_key, read_keys
from coatcheck.router.access.tenant import Tenant
from coatcheck.workers.host.safe_files import create_file

_PREFIX: Final = "cc-"  # so that people and scanners for leaked secrets recognize a key
_BYTES: Final = 32


def keys(
    action: Annotated[Literal["new"], typer.Argument(help="new: make a key.")],
    tenant: Annotated[str, typer.Argument(help="The tenant's name. An existing tenant gets one more key.")],
    file: Annotated[Path, typer.Option(help="The file that `coatcheck serve --api-keys` reads.")] = Path("keys.yaml"),
    role: Annotated[
        str | None,
        typer.Option(
            help="Role of a new tenant: user (default; generate), monitor (read the status) or admin (everything)."
        ),
    ] = None,
) -> None:
    """Make an API key for TENANT, print it, and add its hash to the key file, which running routers read again."""
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    _add_key(file.expanduser(), tenant, hash_key(key), role)
    print(key)
    print(f"{tenant}'s key, shown this once; {file} has its hash", file=sys.stderr)


def _add_key(file: Path, name: str, hashed: str, role: str | None) -> None:
    import yaml

    tenants: list[dict[str, Any]] = []
    if file.exists():
        read_keys(str(file))  # raises if the file is invalid
        tenants = yaml.safe_load(file.read_text())["tenants"]
    entry = next((entry for entry in tenants if entry["name"] == name), None)
    if entry is not None and role is not None and role != entry.get("role", "user"):
        raise InvalidConfig(f"{name!r} has the role {entry.get('role', 'user')} already; change it in {file}")
    if entry is None:
        Tenant(name, role=role or "user")  # raises if the name or the role is invalid
        entry = {"name": name, "role": role or "user", "keys": []}
        tenants.append(entry)
    entry.setdefault("keys", []).append(hashed)
    # Replaced as a whole, because a router may read the file at any moment. Comments in the file are lost.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else None
    try:
        with os.fdopen(create_file(temporary, mode=0o666 if mode is None else 0o600), "w") as output:
            if mode is not None:
                os.fchmod(output.fileno(), mode)
            output.write(yaml.safe_dump({"tenants": tenants}, sort_keys=False))
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidConfig(f"{file}: {error.strerror or error}") from None
