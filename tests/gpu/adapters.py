"""The part `adapters`: LoRA adapters are refused on GPUs, as docs/models.md says."""

from pathlib import Path

import torch

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.core.lora_module import LoraModule
from tests.gpu.outcome import Skipped
from tests.gpu.served import serve_tiny
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.lora.adapter_files import write_adapter

LIMIT = 60.0


def names(whole: bool) -> list[str]:
    return ["llama"]


def run(name: str, device: torch.device, folder: Path) -> str:
    if device.type == "cpu":
        raise Skipped("CPUs serve adapters; tests/workers/lora checks them")
    base = tiny_checkpoint(name, folder, num_hidden_layers=2)
    module = LoraModule("first", str(write_adapter(base, folder / "adapter", seed=1)))
    try:
        serve_tiny(base, device, lora_modules=[module])
    except (InvalidConfig, InvalidModel) as error:
        assert "only on CPUs" in str(error), error
        return str(error)
    raise AssertionError("the adapter was not refused")
