"""Checkpoint: a model's config.json and safetensors files, from a local directory or the Hugging Face hub.

`open` reads and checks the headers. `read` reads a tensor, or a slice of one. A quantised weight has the name that it
has in an unquantised checkpoint. `read` dequantises it, `read_quantised` does not.
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

from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_weight import QuantisedWeight
from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.model_folder import describe_other_path
from coatcheck.workers.checkpoint.decode_weight import decode_weight, read_codes
from coatcheck.workers.checkpoint.model_alias import resolve_alias
from coatcheck.workers.checkpoint.quantisation_scheme import read_model_config
from coatcheck.workers.checkpoint.quantised_layouts import plain_entries, read_quantised
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry, read_entries, stored_dtype
from coatcheck.workers.checkpoint.stored_weight import StoredWeight
from coatcheck.workers.checkpoint.text_tower import is_multimodal, text_tensor_name
from coatcheck.workers.distributed.tensor_slice import TensorSlice

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # the oldest models have no owner
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_HUB_COPIES = ("consolidated*", "*/*")  # the same weights in other formats, which are not downloaded
_FINGERPRINT_BYTES = 64  # bytes of each tensor that the fingerprint reads


class Checkpoint:
    """A context manager: files stay open until `close`.

    `entries`: every tensor by name. A quantised weight has one entry, with the name, shape and dtype of an unquantised
    weight. Of a multimodal checkpoint it has only the tensors of the text model, with the names that they have in a
    text checkpoint. `skipped`: the number of the other tensors.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        config = read_model_config(directory / "config.json")
        if config is None:
            raise InvalidModel(describe_other_path(directory))
        self.config = resolve_alias(config)
        self._stored = read_entries(directory)
        quantised = read_quantised(name, self.config, self._stored)
        plain = plain_entries(self._stored, quantised)
        self._plain_names = {text_name: key for key in plain if (text_name := self.text_name(key)) is not None}
        self._quantised = {
            name: quantised.weights[key] for name, key in self._plain_names.items() if key in quantised.weights
        }
        self.entries = {text_name: plain[key] for text_name, key in self._plain_names.items()}
        self.skipped = len(plain) - len(self.entries)
        if not self.entries:
            raise InvalidModel(f"{name}: no tensor has a name of a text model; fetch the checkpoint again")
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(cls, path_or_id: str) -> Self:
        """Open a directory, or download a model id. Raises InvalidModel if that fails, or if a file is broken."""
        local = Path(path_or_id).expanduser()
        if local.is_dir():
            return cls(local.resolve().name, local)
        if local.exists() or not _HUB_ID.fullmatch(path_or_id):
            # The directory may exist on the host of `coatcheck serve` and not on the rank's host.
            raise InvalidModel(
                f"no model directory {path_or_id} on {socket.gethostname()}; every node with ranks needs the directory "
                "under this path, mounted or copied; or give a Hugging Face model id"
            )
        return cls(path_or_id, _download(path_or_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._handles.clear()
        self._open.close()

    def text_name(self, key: str) -> str | None:
        """The name that a stored tensor has in a checkpoint of the text model alone; None if it is not part of the text
        model."""
        return text_tensor_name(key) if is_multimodal(self.config) else key

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor. Raises InvalidModel for a dtype that is not served."""
        dtype: torch.dtype = getattr(torch, stored_dtype(self.name, name, self.entries[name]))
        return dtype

    def is_quantised(self, name: str) -> bool:
        """Whether the tensor is a quantised weight."""
        return name in self._quantised

    def slice_bytes(self, name: str, part: TensorSlice | None) -> int:
        """The bytes that `read` reads from the files for the same arguments."""
        if (weight := self._quantised.get(name)) is None:
            return _slice_bytes(self.entries[name], part)
        slices = _part_slices(weight, part)
        return sum(_slice_bytes(self._stored[stored.key], slices.get(role)) for role, stored in weight.parts.items())

    def read(self, name: str, part: TensorSlice | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor, or a slice of it, on the CPU. `dtype`: to which a quantised weight is dequantised; by default the
        dtype of the checkpoint's other tensors. Raises InvalidModel if the file cannot be read."""
        stored_as = self.dtype_of(name)
        if (weight := self._quantised.get(name)) is None:
            return self._read_stored(self._plain_names[name], part)
        slices, parts = self._read_parts(weight, part)
        decoded = decode_weight(weight, parts, dtype or stored_as)
        if part is None or slices:
            return decoded
        return torch.cat([decoded.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)

    def read_quantised(
        self, name: str, part: TensorSlice | None, dtype: torch.dtype
    ) -> QuantisedWeight | QuantisedExperts | None:
        """A quantised weight, or a slice of it, without dequantising it; QuantisedExperts if one tensor holds all
        experts. `dtype`: in which its linear computes. None if the weight is not quantised, or if the slice can only be
        read dequantised."""
        if (weight := self._quantised.get(name)) is None:
            return None
        slices, parts = self._read_parts(weight, part)
        quantised = read_codes(weight, parts, dtype)
        if quantised is None or part is None or slices:
            return quantised
        if part.dim == 0 and isinstance(quantised, QuantisedWeight):
            return quantised.select_rows(part.ranges)
        return quantised.select_columns(*part.ranges[0]) if len(part.ranges) == 1 else None

    def _read_parts(
        self, weight: StoredWeight, part: TensorSlice | None
    ) -> tuple[dict[str, TensorSlice | None], dict[str, Tensor]]:
        """({role: slice of the stored tensor}, see _part_slices; {role: the stored tensor, sliced})."""
        slices = _part_slices(weight, part)
        return slices, {role: self._read_stored(kept.key, slices.get(role)) for role, kept in weight.parts.items()}

    def _read_stored(self, key: str, part: TensorSlice | None) -> Tensor:
        file = self._stored[key].file
        try:
            if file not in self._handles:
                self._handles[file] = self._open.enter_context(safe_open(file, framework="pt", device="cpu"))
            if part is None:
                whole: Tensor = self._handles[file].get_tensor(key)
                return whole
            lazy = self._handles[file].get_slice(key)
        except SafetensorError as error:
            raise InvalidModel(f"{file} cannot be read: {error}; fetch it again") from error
        before = (slice(None),) * part.dim
        ranges = [lazy[(*before, slice(start, stop))] for start, stop in part.ranges]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim=part.dim)

    def fingerprint(self) -> str:
        """A hash of the config and of every tensor's name, shape, dtype and 64 bytes from its middle.

        Groups with equal fingerprints serve the same weights. Block hashes contain it.
        """
        digest = hashlib.blake2b(digest_size=16)
        # Fields that do not change what the model computes.
        stable = {k: v for k, v in self.config.items() if k not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(stable, sort_keys=True).encode())
        with ExitStack() as stack:
            files = {file: stack.enter_context(file.open("rb")) for file in {e.file for e in self._stored.values()}}
            for name, entry in sorted(self._stored.items()):
                digest.update(f"\n{name} {entry.dtype} {entry.shape} ".encode())
                size = min(_FINGERPRINT_BYTES, entry.end - entry.start)
                files[entry.file].seek((entry.start + entry.end - size) // 2)
                digest.update(files[entry.file].read(size))
        return digest.hexdigest()


def _slice_bytes(entry: TensorEntry, part: TensorSlice | None) -> int:
    whole = entry.end - entry.start
    return whole if part is None else whole * part.size // entry.shape[part.dim]


def _part_slices(weight: StoredWeight, part: TensorSlice | None) -> dict[str, TensorSlice | None]:
    """{role: slice of the stored tensor}; empty if the stored tensors must be read whole."""
    return {} if part is None else weight.slice_parts(part) or {}


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # imported here, because local checkpoints do not need it

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_COPIES)))
    except (OSError, ValueError) as error:  # the hub's errors are subclasses: not found, gated, offline, malformed id
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidModel(f"{hub_id} is no directory, and cannot be downloaded from the hub: {reason}") from None
