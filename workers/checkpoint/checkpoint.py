"""Checkpoint: a model's files on disk: where they are, what tensors they hold, and slices of them.

Reads a local directory, or a hub id through huggingface_hub. Headers are read and checked at once, tensor bytes only
when a slice is asked for. It does not know which tensor belongs to which parameter, nor about ranks.
"""

import hashlib
import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.checkpoint.safetensors_headers import read_entries, stored_dtype
from coatcheck.workers.distributed.tensor_slice import TensorSlice

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # the hub's oldest have no owner
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_HUB_COPIES = ("consolidated*", "*/*")  # the same weights again in their makers' own layouts
_SAMPLE_BYTES = 64


class Checkpoint:
    """Open files are held until `close`; use it as a context manager."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        config = read_json_object(directory / "config.json")
        if config is None:
            raise InvalidModel(f"{directory} has no config.json; is it a transformers checkpoint?")
        self.config = config
        self.entries = read_entries(directory)
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
        dtype: torch.dtype = getattr(torch, stored_dtype(self.name, name, self.entries[name]))
        return dtype

    def bytes_of(self, name: str, cut: TensorSlice | None) -> int:
        """How much `read` would take from the file."""
        entry = self.entries[name]
        whole = entry.end - entry.start
        return whole if cut is None else whole * cut.size // entry.shape[cut.dim]

    def read(self, name: str, cut: TensorSlice | None = None) -> Tensor:
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
