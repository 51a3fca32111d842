"""Three tenants with a key each, as a key file has them and as their requests send them."""

import json
from pathlib import Path

from coatcheck.router.access.key_file import hash_key

SEARCH, OPS, EYES = "cc-search-key", "cc-ops-key", "cc-eyes-key"


def write_keys(file: Path) -> str:
    """Three tenants: a user, an admin, a monitor."""
    tenants = [
        {"name": "search", "keys": [hash_key(SEARCH)]},
        {"name": "ops", "keys": [hash_key(OPS)], "role": "admin"},
        {"name": "eyes", "keys": [hash_key(EYES)], "role": "monitor"},
    ]
    file.write_text(json.dumps({"tenants": tenants}))
    return str(file)


def bearer(key: str) -> list[tuple[str, str]]:
    """As gRPC's metadata."""
    return [("authorization", f"Bearer {key}")]
