"""The tensors of a checkpoint's safetensors files, read from the files' headers alone.

A header is a few kilobytes at the start of a file, so a checkpoint of hundreds of gigabytes is checked within a second.
`coatcheck serve` and `coatcheck plan` use this module before torch is imported.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object

# {dtype in a header: torch's name}. Other dtypes are not served.
STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_COMPARED_BYTES: Final = 1 << 22
_LFS_POINTER: Final = b"version https://git-lfs"
_OTHER_FORMATS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.ckpt", "*.h5", "*.msgpack")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. `start` and `end` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint, by name. Raises InvalidModel for missing or broken files, and other formats."""
    entries: dict[str, TensorEntry] = {}
    for file in _tensor_files(directory):
        try:
            entries.update(read_header(file))
        except OSError as error:
            raise InvalidModel(f"{file} cannot be read: {error.strerror or error}") from error
    if not entries:
        raise InvalidModel(f"{directory}: its safetensors files hold no tensor; fetch it again")
    return entries


def stored_dtype(model: str, name: str, entry: TensorEntry) -> str:
    """The torch name of the tensor's dtype. Raises InvalidModel for a dtype that is not served."""
    if entry.dtype not in STORED_DTYPES:
        raise InvalidModel(
            f"{model}: tensor {name} is stored as {entry.dtype}; only {', '.join(STORED_DTYPES)} are served unless "
            "config.json has a quantization_config that explains it; fetch the checkpoint again, or convert it"
        )
    return STORED_DTYPES[entry.dtype]


def are_stored_alike(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors are stored with the same dtype, shape and bytes. Compares _COMPARED_BYTES at a time."""
    size = one.end - one.start
    if (one.dtype, one.shape, size) != (other.dtype, other.shape, other.end - other.start):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        steps = (min(_COMPARED_BYTES, size - start) for start in range(0, size, _COMPARED_BYTES))
        return all(first.read(step) == second.read(step) for step in steps)


def _tensor_files(directory: Path) -> list[Path]:
    """The files that the index names; without an index, all safetensors files."""
    index = directory / "model.safetensors.index.json"
    if (content := read_json_object(index)) is not None:
        named = content.get("weight_map")
        values = list(named.values()) if isinstance(named, dict) else []
        if not values or not all(isinstance(name, str) and Path(name).name == name != ".." for name in values):
            raise InvalidModel(f"{index} does not map tensors to files beside it; fetch it again")
        names = set(values)
        missing = sorted(name for name in names if not (directory / name).is_file())
        if missing:
            raise InvalidModel(
                f"{directory}: {index.name} names {_shorten(missing)}, which are missing; fetch it again"
            )
        return [directory / name for name in sorted(names)]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(file for file in directory.glob("*.safetensors") if file.is_file())
    if not files:
        others = sorted(file.name for pattern in _OTHER_FORMATS for file in directory.glob(pattern))
        if not others:
            raise InvalidModel(f"{directory} has no safetensors file; fetch the model's weights too")
        raise InvalidModel(
            f"{directory} has no safetensors file (it has {_shorten(others)}); other weight formats are not read: "
            "convert the weights with transformers' from_pretrained and save_pretrained, which writes safetensors"
        )
    return files


def read_header(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The entries of one file. It starts with the header's length (u64, little endian), then the header as JSON. Raises
    InvalidModel for a broken file, OSError if it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == _LFS_POINTER[:8]:
            raise InvalidModel(f"{file} is a Git LFS pointer instead of weights; run `git lfs pull` in its directory")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if len(prefix) == 8 and length > _MAX_HEADER_BYTES:
            raise InvalidModel(f"{file} is not a safetensors file: it does not start with a header; fetch it again")
        if 8 + length > size:
            raise InvalidModel(f"{file} is truncated ({size} bytes, the header is incomplete); fetch it again")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise InvalidModel(f"{file} is not a safetensors file: {error}") from error
    try:
        entries = {name: _entry(file, 8 + length, info) for name, info in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{file} has a header that does not describe tensors; fetch it again") from error
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if size > end:
        raise InvalidModel(f"{file} is longer than its header promises ({size} bytes, not {end}); fetch it again")
    if size < end:
        raise InvalidModel(f"{file} is truncated ({size} bytes, its header promises {end}); fetch it again")
    try:  # the library checks that offsets have no gaps and sizes match shapes
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise InvalidModel(f"{file} cannot be read: {error}; fetch it again") from error
    yield from entries.items()


def _entry(file: Path, base: int, info: dict[str, Any]) -> TensorEntry:
    """One entry. Raises AttributeError, KeyError, TypeError or ValueError if `info` is malformed."""
    start, end = map(int, info["data_offsets"])
    return TensorEntry(file, str(info["dtype"]), tuple(map(int, info["shape"])), base + start, base + end)


def _shorten(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
