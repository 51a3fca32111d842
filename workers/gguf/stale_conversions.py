"""Which folders of the cache of conversions are in use, and which can be deleted.

A folder of the cache is CACHE/KEY. Beside the converted model it has two files:

- `source.json`: the paths, sizes and times of change of the GGUF files, and the version of the conversion. A folder is
  stale if its paths are those of the present files but something else differs: no later start finds it.
- `in-use`: processes that serve the folder, or convert into it, hold a shared lock on this file until they end; so do
  their forked children. A stale folder is deleted only by a process that gets the exclusive lock. A file `kept` beside
  it keeps the folder in any case: a cluster that outlives its command may restart ranks when no process has the lock.
"""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_SOURCE: Final = "source.json"
_IN_USE: Final = "in-use"
_KEPT: Final = "kept"
_REMOVED: Final = ".removed"  # ends the names of folders that are being deleted
_held: Final[dict[Path, int]] = {}  # {folder: descriptor of its lock}, until this process ends


@dataclass(frozen=True, slots=True)
class Source:
    """`files`: (path, bytes, time of change in ns) of each. `version`: of what a conversion writes."""

    files: tuple[tuple[str, int, int], ...]
    version: int

    @property
    def paths(self) -> list[str]:
        return [path for path, *_ in self.files]

    @classmethod
    def read(cls, path: Path) -> "Source":
        """Raises OSError, and KeyError, TypeError or ValueError for a file of other content."""
        stored = json.loads(path.read_text())
        return cls(tuple((str(name), int(size), int(at)) for name, size, at in stored["files"]), int(stored["version"]))


def hold_for_process(folder: Path, source: Source, *, outlives: bool = False) -> None:
    """Create the folder of a conversion, and keep other processes from deleting it until this process ends.
    `outlives`: keep it for ever, because a cluster that uses it runs on after this process."""
    # Another process may delete the folder while this one waits for its lock; a user at any time.
    while folder not in _held or not is_open_at(folder / _IN_USE, _held[folder]):
        if folder in _held:
            os.close(_held.pop(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            _held[folder] = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(_held[folder], fcntl.LOCK_SH)
    (folder / _SOURCE).write_text(json.dumps(asdict(source)))
    if outlives:
        (folder / _KEPT).touch()


def remove_stale(cache: Path, source: Source) -> int:
    """Delete the stale conversions of the files `source` that no process uses. Returns how many bytes that frees."""
    freed = 0
    for left in cache.glob(f".*{_REMOVED}"):  # by a process that was killed
        freed += _delete(left)
    for folder in sorted(cache.glob(f"*/{_SOURCE}")):
        if _is_stale(folder, source):
            freed += _delete_unless_used(folder.parent)
    return freed


def _is_stale(path: Path, source: Source) -> bool:
    """`path`: of a source.json."""
    try:
        stored = Source.read(path)
    except (OSError, KeyError, TypeError, ValueError):
        return False  # unknown, or just deleted
    return stored.paths == source.paths and stored != source


def _delete_unless_used(folder: Path) -> int:
    try:
        handle = os.open(folder / _IN_USE, os.O_RDWR)
    except OSError:
        return 0
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_open_at(folder / _IN_USE, handle) or (folder / _KEPT).exists():
            return 0
        # Renamed first: from now on a process that wants the folder makes a new one.
        return _delete(folder.rename(folder.with_name(f".{folder.name}{_REMOVED}")))
    except OSError:
        return 0
    finally:
        os.close(handle)


def _delete(folder: Path) -> int:
    sizes = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            sizes += file.stat().st_size if file.is_file() else 0
    shutil.rmtree(folder, ignore_errors=True)
    return sizes


def is_open_at(path: Path, handle: int) -> bool:
    """Whether `path` is the file that `handle` has open."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False
