"""The part `adapters`: requests with LoRA adapters and without, on a GPU and on the CPU."""

from dataclasses import replace
from pathlib import Path

import torch

from coatcheck.workers.core.lora_module import LoraModule
from tests.gpu.comparison import EXACT, compare_paths
from tests.gpu.outcome import Skipped
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.lora.adapter_files import write_adapter

LIMIT = 120.0
# Both devices quantise a weight to the same codes, and multiply with them in another order.
_INT8 = replace(EXACT, most=2e-2, mean=5e-3)


def names(whole: bool) -> list[str]:
    return ["llama", "int8 llama", "phi3", "olmo2", "lfm2"]


def run(name: str, device: torch.device, folder: Path) -> str:
    if device.type == "cpu":
        raise Skipped("CPUs have other code for adapters; tests/workers/lora checks both")
    quantization, _, arch = name.rpartition(" ")
    base = tiny_checkpoint(arch, folder)
    write_adapter(base, folder / "all", seed=1)
    write_adapter(
        base, folder / "few", seed=2, rank=70, alpha=140.0, linears=("q_proj", "qkv_proj", "down_proj", "in_proj")
    )
    modules = [LoraModule(one, str(folder / one)) for one in ("all", "few")]
    return compare_paths(
        base, device, _INT8 if quantization else EXACT, quantization=quantization or "auto", lora_modules=modules
    )
