"""Checkpoint: a model's files on disk: where they are, what tensors they hold, and slices of them.

Reads a local directory, or a hub id through huggingface_hub. Headers are read and checked at once, tensor bytes only
when a slice is asked for. It does not know which tensor belongs to which parameter, nor about ranks.
"""

import hashlib
import json
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..proto.errors import InvalidModel
from .cut import Cut

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_HUB_COPIES = ("consolidated*", "*/*")  # the same weights again in their makers' own layouts
_SAMPLE_BYTES = 64
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file's header describes it; `start` and `end` are byte offsets in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """Open files are held until `close`; use it as a context manager."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.config = _read_json(directory / "config.json", "a model directory has a config.json")
        self.entries: dict[str, TensorEntry] = {}
        for file in _tensor_files(directory):
            self.entries.update(_read_header(file))
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(cls, path_or_id: str) -> Self:
        """Finds the checkpoint, and downloads it where it is a hub id. Raises InvalidModel with what is wrong."""
        local = Path(path_or_id).expanduser()
        if local.is_dir():
            return cls(local.resolve().name, local)
        if local.exists() or not _HUB_ID.fullmatch(path_or_id):
            # `coatcheck serve` may have seen it, on another host.
            raise InvalidModel(
                f"no model directory {path_or_id} on {socket.gethostname()}; give a directory with config.json that "
                "every node with ranks has under this path, mounted or copied, or a hub id"
            )
        return cls(path_or_id, _download(path_or_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the files go."""
        self._handles.clear()
        self._open.close()

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises InvalidModel where the stored dtype is one that we do not serve."""
        stored = self.entries[name].dtype
        if stored not in _DTYPES:
            raise InvalidModel(
                f"{self.name}: tensor {name} is stored as {stored}; only {', '.join(_DTYPES)} checkpoints are served: "
                "convert it, or take the unquantised one"
            )
        return _DTYPES[stored]

    def bytes_of(self, name: str, cut: Cut | None) -> int:
        """How much `read` would take from the file."""
        entry = self.entries[name]
        whole = entry.end - entry.start
        return whole if cut is None else whole * cut.size // entry.shape[cut.dim]

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """The tensor, or only the cut's part of it."""
        self.dtype_of(name)
        file = self.entries[name].file
        try:
            if file not in self._handles:
                self._handles[file] = self._open.enter_context(safe_open(file, framework="pt", device="cpu"))
            if cut is None:
                whole: Tensor = self._handles[file].get_tensor(name)
                return whole
            piece = self._handles[file].get_slice(name)
        except SafetensorError as error:
            raise InvalidModel(f"{file} cannot be read: {error}; fetch it again") from error
        before = (slice(None),) * cut.dim
        parts = [piece[(*before, slice(start, stop))] for start, stop in cut.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)

    def fingerprint(self) -> str:
        """Names the weights: config, every tensor's name, shape and dtype, and 64 bytes from the middle of each."""
        digest = hashlib.blake2b(digest_size=16)
        # Who saved it and where changes nothing of what it computes.
        stable = {k: v for k, v in self.config.items() if k not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(stable, sort_keys=True).encode())
        with ExitStack() as stack:
            files = {file: stack.enter_context(file.open("rb")) for file in {e.file for e in self.entries.values()}}
            for name, entry in sorted(self.entries.items()):
                digest.update(f"\n{name} {entry.dtype} {entry.shape} ".encode())
                size = min(_SAMPLE_BYTES, entry.end - entry.start)
                files[entry.file].seek((entry.start + entry.end - size) // 2)
                digest.update(files[entry.file].read(size))
        return digest.hexdigest()


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # imported here: most runs never reach for the network

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_COPIES)))
    except (OSError, ValueError) as error:  # its errors derive from these: not found, gated, offline, malformed id
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidModel(f"no directory {hub_id}, and the hub does not give a model of that id: {reason}") from error


def _tensor_files(directory: Path) -> list[Path]:
    """The shards that the index names, or the files there are."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = _read_json(index, "").get("weight_map")
        names = set(named.values()) if isinstance(named, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise InvalidModel(f"{index} does not map tensors to files beside it; fetch it again")
        missing = sorted(name for name in names if not (directory / name).is_file())
        if missing:
            raise InvalidModel(f"{directory}: {index.name} names {', '.join(missing)}, missing here; fetch it again")
        return [directory / name for name in sorted(names)]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(file for file in directory.glob("*.safetensors") if file.is_file())
    if not files:
        raise InvalidModel(f"{directory} has no safetensors file; other weight formats are not read: convert it first")
    return files


def _read_json(file: Path, hint: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise InvalidModel(f"{file} is missing: {hint}") from error
    except ValueError as error:
        raise InvalidModel(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{file} does not hold a JSON object")
    return content


def _read_header(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """A safetensors file opens with its header's length (u64, little endian), then the header as JSON."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise InvalidModel(f"{file} is truncated ({size} bytes, the header is incomplete); fetch it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise InvalidModel(f"{file} is not a safetensors file: {error}") from error
    try:
        entries = {name: _entry(file, 8 + length, info) for name, info in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{file} has a header that does not describe tensors; fetch it again") from error
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end != size:
        raise InvalidModel(f"{file} is truncated ({size} bytes, its header promises {end}); fetch it again")
    yield from entries.items()


def _entry(file: Path, base: int, info: dict[str, Any]) -> TensorEntry:
    """As a header has it; raises whatever indexing gives where that is something else."""
    start, end = map(int, info["data_offsets"])
    return TensorEntry(file, str(info["dtype"]), tuple(map(int, info["shape"])), base + start, base + end)
