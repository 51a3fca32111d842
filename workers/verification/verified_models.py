"""Records of the models that were verified on this host, so that each is verified once. Imports no torch.

A record is a file in $XDG_CACHE_HOME/coatcheck/verified (by default ~/.cache). Its name is a hash of the model's
config.json and of the versions of Coatcheck, torch and transformers. With another version the model is verified again.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from coatcheck.workers.host.user_cache import user_cache, write_whole

# Fields of config.json that do not change what the model computes.
_UNUSED_FIELDS: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config")
# A folder that cannot be created, because its parent is a file.
_NO_FOLDER: Final = Path(os.devnull)


def record_of(config: Mapping[str, Any]) -> Path:
    """The file that exists if a model with this config.json was verified. For a user without a home it can never exist,
    so the model is verified at each start."""
    used = {name: value for name, value in config.items() if name not in _UNUSED_FIELDS}
    versions = [metadata.version(package) for package in ("coatcheck", "torch", "transformers")]
    key = hashlib.blake2b(json.dumps([used, versions], sort_keys=True).encode(), digest_size=16).hexdigest()
    return (user_cache() or _NO_FOLDER) / "verified" / f"{key}.json"


def write_record(record: Path, about: Mapping[str, Any]) -> None:
    """Write `about` to the file. If that fails, the model is verified again at the next start."""
    with suppress(OSError):
        write_whole(record, json.dumps(about))


@contextmanager
def one_at_a_time(record: Path) -> Iterator[None]:
    """Hold the record's lock, so that of the ranks of a host that start together one verifies, and the others find its
    record. There is no lock if the cache cannot be written."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        lock = record.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
