"""Adapter: a LoRA adapter's config and weights header, checked against the base model. Imports no torch.

An adapted linear computes  y = x W^T + scaling · (x A^T) B^T. `adapter_model.safetensors` has two tensors for it:
base_model.model.NAME.lora_A.weight, A [rank, in], and base_model.model.NAME.lora_B.weight, B [out, rank].
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.safetensors_headers import STORED_DTYPES, TensorEntry, read_header
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.lora.adapter_config import AdapterConfig, read_adapter_config

_FILE: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"  # what older versions of PEFT wrote
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_READ_BYTES: Final = 1 << 22
_ROW_PARALLEL: Final = (
    "o_proj",
    "out_proj",
    "x_proj",
    "down_proj",
    "dense",
    "fc2",
    "fc_out",
    "c_proj",
    "dense_4h_to_h",
)


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A and B of one linear of the base model. `a_name`, `b_name`: the tensors' names in the file. `scaling`: the
    factor of (x A^T) B^T."""

    a_name: str
    b_name: str
    rank: int
    in_features: int
    out_features: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """`file`: the weights. `modules`: by the name of the linear in a checkpoint of the text model alone, without
    ".weight"."""

    name: str
    file: Path
    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]

    @classmethod
    def open(cls, lora_module: LoraModule, text_name: Callable[[str], str | None] = lambda name: name) -> Self:
        """Read the config and the file's header. Raises InvalidModel with the adapter's name and what to change.

        `text_name`: maps a tensor's name in the base model to its name in a checkpoint of the text model alone. It
        returns None for a tensor of another part, such as a vision tower.
        """
        directory = Path(lora_module.path)
        try:
            return cls._read(lora_module.name, directory, text_name)
        except OSError as error:
            file = error.filename or directory
            raise InvalidModel(
                f"lora-modules {lora_module.name}: {file} cannot be read: {error.strerror or error}"
            ) from None

    @classmethod
    def _read(cls, name: str, directory: Path, text_name: Callable[[str], str | None]) -> Self:
        if not directory.is_dir():
            raise InvalidModel(
                f"lora-modules {name}: no directory {directory} on this host; adapters are not downloaded, and every "
                "node with ranks needs the directory under this path"
            )
        config = read_adapter_config(name, directory)
        if not (file := directory / _FILE).is_file():
            pickled = " (it has adapter_model.bin, which is not read)" if (directory / _PICKLED).is_file() else ""
            raise InvalidModel(
                f"lora-modules {name}: {directory} has no {_FILE}{pickled}; load the adapter with PEFT and save it "
                "with save_pretrained"
            )
        return cls(name, file, config, _modules(name, config, dict(read_header(file)), text_name))

    def check_base(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raise InvalidModel for a module that the base model lacks, or has in another shape. `shapes`: [out, in] of
        the base model's linears that can have adapters, by name."""
        for name, module in self.modules.items():
            if name not in shapes:
                kinds = sorted({known.rpartition(".")[2] for known in shapes if ".layers." in known or ".h." in known})
                raise InvalidModel(
                    f"lora-modules {self.name} adapts {name}, which the model lacks or whose adapters are not served; "
                    f"linears that can have adapters: {', '.join(kinds) or 'none'}; check that this is the adapter's "
                    "base model, or merge the adapter into it"
                )
            if shapes[name] != (have := (module.out_features, module.in_features)):
                raise InvalidModel(
                    f"lora-modules {self.name}: {name} is [{have[0]}, {have[1]}] in the adapter and "
                    f"{list(shapes[name])} in the model; the adapter belongs to another base model"
                )

    def fingerprint(self) -> str:
        """A hash of all weights and scalings, for block hashes. Adapters with equal fingerprints compute the same."""
        digest = hashlib.blake2b(digest_size=16)
        scalings = {name: module.scaling for name, module in self.modules.items()}
        digest.update(json.dumps(scalings, sort_keys=True).encode())
        with self.file.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def rank_bytes(self, tp: int, kv_ranks: int, element_size: int) -> int:
        """Bytes of A and B on each of `tp` ranks, with `element_size` bytes for each number. `kv_ranks`: the number of
        parts into which the KV heads are divided; less than `tp` if several ranks hold the same head."""
        total = 0
        for name, module in self.modules.items():
            leaf, out, width = name.rpartition(".")[2], module.out_features, module.in_features
            if leaf in _ROW_PARALLEL:
                width //= tp
            else:
                out //= kv_ranks if leaf in ("k_proj", "v_proj") else tp
            total += element_size * module.rank * (out + width)
        return total


def _modules(
    adapter: str, config: AdapterConfig, entries: Mapping[str, TensorEntry], text_name: Callable[[str], str | None]
) -> dict[str, AdaptedModule]:
    keys_by_module: dict[str, dict[str, str]] = {}  # the names of A and B in the file
    own_names: dict[str, str] = {}  # of the modules, in the model that the adapter was trained on
    for key in entries:
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise InvalidModel(
                f"lora-modules {adapter}: {key} is not A or B of a linear; embeddings, biases and magnitudes are not "
                "served: merge the adapter into its base model"
            )
        if entries[key].dtype not in STORED_DTYPES:
            raise InvalidModel(
                f"lora-modules {adapter}: {key} is stored as {entries[key].dtype}; only {', '.join(STORED_DTYPES)} are "
                "served: save the adapter in one of them"
            )
        if (name := text_name(f"{match[1]}.weight")) is None:
            raise InvalidModel(f"lora-modules {adapter} adapts {match[1]}, which is no part of the text model")
        name = name.removesuffix(".weight")
        keys = keys_by_module.setdefault(name, {})
        if match[2] in keys:
            raise InvalidModel(
                f"lora-modules {adapter}: {keys[match[2]]} and {key} are both lora_{match[2]} of {name}; save the "
                "adapter again"
            )
        keys[match[2]] = key
        own_names[name] = match[1]
    if not keys_by_module:
        raise InvalidModel(f"lora-modules {adapter}: {_FILE} holds no tensor; save the adapter again")
    modules = {}
    for name, keys in sorted(keys_by_module.items()):
        if set(keys) != {"A", "B"}:
            raise InvalidModel(
                f"lora-modules {adapter}: {name} has only lora_{next(iter(keys))}; save the adapter again"
            )
        a, b = entries[keys["A"]].shape, entries[keys["B"]].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise InvalidModel(
                f"lora-modules {adapter}: {name} has A {list(a)} and B {list(b)}; they must be [rank, in] and "
                "[out, rank]"
            )
        if a[0] != (rank := config.rank_of(own_names[name])):
            raise InvalidModel(
                f"lora-modules {adapter}: {name} has rank {a[0]} in {_FILE} and {rank:g} in adapter_config.json (r and "
                "rank_pattern), so its scaling is unknown; save the adapter again"
            )
        scaling = config.scaling_of(own_names[name])
        modules[name] = AdaptedModule(keys["A"], keys["B"], a[0], a[1], b[0], scaling)
    return modules
