"""Where GGUF files are converted to: each file once, into a folder of the cache, or into a folder that a user names.

A folder of the cache is $XDG_CACHE_HOME/coatcheck/gguf/KEY/NAME (by default ~/.cache). KEY is a hash of the files'
paths, sizes and times of change, of the dtype, and of the version of the conversion, so a file that has changed is
converted again, and the conversions of its former contents are deleted. A conversion writes into a draft beside the
folder and renames it at the end. It holds a lock on the draft, so that of two processes one converts and the other
waits; what a killed process has left is deleted.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.converter import Conversion, Progress
from coatcheck.workers.gguf.model_path import model_stem, split_files
from coatcheck.workers.gguf.stale_conversions import Source, hold_for_process, is_open_at, remove_stale
from coatcheck.workers.host.user_cache import user_cache

_VERSION: Final = 1  # of what a conversion writes: a higher one converts every file again
_SPARE: Final = 64 << 20  # bytes beside the weights: tokenizer and headers


def cached_directory(path: Path, dtype: str) -> Path:
    """The folder in the cache for the GGUF file `path`; it exists once the file is converted. Raises InvalidModel for a
    user without a home."""
    key = hashlib.blake2b(json.dumps([_source_of(path).files, dtype, _VERSION]).encode(), digest_size=12).hexdigest()
    return _cache() / key / model_stem(path)


def hold_directory(path: Path, dtype: str, *, outlives: bool = False) -> Path:
    """The result of cached_directory(). No other process deletes this folder until this process ends, or ever if
    `outlives`, for a cluster that runs on after this process. A finished conversion in a cache that this user can only
    read is used without that protection. Raises InvalidModel if the folder cannot be made."""
    directory = cached_directory(path, dtype)
    try:
        hold_for_process(directory.parent, _source_of(path), outlives=outlives)
    except OSError as error:
        if not directory.is_dir():
            raise _cannot_convert(path, directory, error) from None
    return directory


def convert(path: Path, directory: Path, dtype: str, progress: Progress | None = None) -> int:
    """Convert the GGUF file `path` into `directory`. If another process converts it, wait, and use its result. If
    `directory` is in the cache, conversions of the file's former contents that no process uses are deleted first.
    Returns how many bytes the deletion freed.

    Raises InvalidModel for a file that is broken or not served, for too little room, and if the folder cannot be
    written.
    """
    draft, freed = directory.with_name(f".{directory.name}.draft"), 0
    try:
        with _locked(draft):
            if _is_written(directory):
                with suppress(OSError):  # it became the directory
                    draft.rmdir()
                return 0
            for left in draft.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                conversion = Conversion.plan(path, dtype)
                if _is_cached(directory):
                    freed = remove_stale(_cache(), _source_of(path))
                _check_room(conversion, draft)
                conversion.write(draft, progress)
                draft.rename(directory)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except OSError as error:
        raise _cannot_convert(path, directory, error) from None
    return freed


def _is_written(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _source_of(path: Path) -> Source:
    files = ((str(file.resolve()), file.stat()) for file in split_files(path))
    return Source(tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files), _VERSION)


def _is_cached(directory: Path) -> bool:
    with suppress(InvalidModel):
        return directory.parent.parent == _cache()
    return False


def _cannot_convert(path: Path, directory: Path, error: OSError) -> InvalidModel:
    return InvalidModel(
        f"{path} cannot be converted into {directory}: {error.strerror or error}; give another folder with "
        "`coatcheck convert`, or another cache with XDG_CACHE_HOME"
    )


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Hold the lock of the folder `draft`, which exists inside the context."""
    final = draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))
    while True:
        draft.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(draft, os.O_RDONLY)
        except FileNotFoundError:  # another process has just renamed or deleted the folder
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process may have renamed or deleted the folder while this one waited for its lock.
            if is_open_at(draft, handle) or _is_written(final):
                yield
                return
        finally:
            os.close(handle)


def _check_room(conversion: Conversion, draft: Path) -> None:
    """Raise InvalidModel if the disk has less room than the converted weights take."""
    needed = _SPARE + sum(tensor.nbytes for tensor in conversion.tensors)
    free = shutil.disk_usage(draft).free
    if needed <= free:
        return
    earlier = _earlier_conversions()
    also = f"; earlier conversions can be deleted: {', '.join(earlier)}" if earlier else ""
    raise InvalidModel(
        f"converting {conversion.file.path} takes {_size(needed)} in {draft.parent}, which has {_size(free)} free; "
        f"free some, or set XDG_CACHE_HOME to a folder on another disk{also}"
    )


def _earlier_conversions() -> list[str]:
    """The three largest folders in the cache, with their sizes."""
    found = []
    with suppress(OSError, InvalidModel):
        for weights in _cache().glob("*/*/model.safetensors"):
            found.append((weights.stat().st_size, weights.parents[1]))
    return [f"{folder} ({_size(size)})" for size, folder in sorted(found, reverse=True)[:3]]


def _size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.0f} MiB"


def _cache() -> Path:
    cache = user_cache()
    if cache is None:
        raise InvalidModel(
            "this user has no home for the conversion of GGUF files; set XDG_CACHE_HOME, or use `coatcheck convert`"
        )
    return cache / "gguf"
