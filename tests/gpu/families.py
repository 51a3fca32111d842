"""The part `families`: tiny models of the families with our own layers, over every kind of KV pool."""

from pathlib import Path
from typing import Any

import torch

from tests.gpu.comparison import EXACT, QUANTISED_POOL, compare_paths, compare_rounded
from tests.workers.checkpoints import ARCHITECTURES, FURTHER_ARCHITECTURES, ON_CPUS, ONE_RANK, tiny_checkpoint

LIMIT = 150.0
_POOLS = ("fp8", "int8", "int4")
# These families have every combination also without --all: plain attention and latent attention with experts.
_WHOLE = ("llama", "deepseek-v3")


def names(whole: bool) -> list[str]:
    """FAMILY POOL, FAMILY POOL deterministic, and FAMILY bfloat16."""
    found = []
    for index, family in enumerate(ARCHITECTURES):
        plain, invariant = (_POOLS[(index + shift) % 3] for shift in (0, 1))
        pools = ("auto", *(_POOLS if whole or family in _WHOLE else (plain,)))
        found += [f"{family} {pool}" for pool in pools]
        pools = ("auto", *(_POOLS if whole or family in _WHOLE else (invariant,)))
        found += [f"{family} {pool} deterministic" for pool in pools]
        found.append(f"{family} bfloat16")
    for family in (*FURTHER_ARCHITECTURES, *ONE_RANK):
        if family in ON_CPUS:
            continue
        found += [f"{family} auto", f"{family} bfloat16"]
    return found


def run(name: str, device: torch.device, folder: Path) -> str:
    family, kind, *rest = name.split()
    path = tiny_checkpoint(family, folder, **_sizes(family))
    if kind == "bfloat16":
        return compare_rounded(path, device)
    bounds = EXACT if kind == "auto" else QUANTISED_POOL
    return compare_paths(path, device, bounds, kv=kind, deterministic=bool(rest))


def _sizes(family: str) -> dict[str, Any]:
    """Few layers, and heads of at least 16 elements, which --deterministic needs on CPUs."""
    if family not in ARCHITECTURES:
        return {}
    is_latent, has_factors = "kv_lora_rank" in ARCHITECTURES[family][1], family == "phi3-longrope"
    return dict(num_hidden_layers=2) | ({} if is_latent or has_factors else dict(num_attention_heads=4))
