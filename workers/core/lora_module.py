"""LoraModule: a LoRA adapter to load. LoadedAdapter: one that a group has loaded."""

from dataclasses import dataclass
from typing import NamedTuple


class LoraModule(NamedTuple):
    """`name`: the model name in requests for this adapter. `path`: a directory that PEFT wrote, with
    adapter_config.json and adapter_model.safetensors."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that every rank of a group holds. `fingerprint`: identifies its weights, for block hashes."""

    name: str
    fingerprint: str
