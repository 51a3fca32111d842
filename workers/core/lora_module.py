"""LoraModule: a LoRA adapter that a group serves, by the name that clients use as the model's."""

from dataclasses import dataclass
from typing import NamedTuple


class LoraModule(NamedTuple):
    """`path`: a directory that PEFT wrote, with adapter_config.json and adapter_model.safetensors."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that every rank of a group holds. `fingerprint`: identifies its weights, for block hashes."""

    name: str
    fingerprint: str
