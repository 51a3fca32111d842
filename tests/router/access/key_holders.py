"""Three tenants with a key each: the key file, and the metadata of their requests."""

import json
from pathlib import Path

from coatcheck.router.access.key_file import hash_key

SEARCH, OPS, EYES = "cc-search-key", "cc-ops-key", "cc-eyes-key"


def write_keys(file: Path) -> str:
    """Writes a key file with a user, an admin and a monitor; returns its path."""
    tenants = [
        {"name": "search", "keys": [hash_key(SEARCH)]},
        {"name": "ops", "keys": [hash_key(OPS)], "role": "admin"},
        {"name": "eyes", "keys": [hash_key(EYES)], "role": "monitor"},
    ]
    file.write_text(json.dumps({"tenants": tenants}))
    return str(file)


def bearer(key: str) -> list[tuple[str, str]]:
    """The key as gRPC metadata."""
    return [("authorization", f"Bearer {key}")]
