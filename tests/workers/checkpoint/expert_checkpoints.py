"""Quantised checkpoints with experts, each beside a checkpoint with the weights that its codes stand for."""

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import GptOssConfig

from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS, write_mxfp4

GPT_OSS = GptOssConfig(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    max_position_embeddings=256, eos_token_id=2, pad_token_id=0,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)  # fmt: skip


def write_pair(family: str, kind: str, directory: Path) -> tuple[Path, Path]:
    """(a quantised checkpoint, one with the weights that its codes stand for)"""
    config = GPT_OSS if family == "gpt-oss" else None
    sizes: dict[str, Any] = dict(moe_intermediate_size=64) if family.startswith(("qwen", "deepseek")) else {}
    if family == "deepseek-v3":
        sizes["q_lora_rank"] = 32
    source = tiny_checkpoint(family, directory, config=config, **sizes)
    quantised, plain = directory / f"{family}-{kind}", directory / f"{family}-{kind}-plain"
    exact = write_mxfp4(source, quantised) if kind == "mxfp4" else FORMATS[kind](source, quantised)
    shutil.copytree(source, plain)
    stored = {name: tensor.contiguous() for name, tensor in exact.items()}
    save_file(stored, plain / "model.safetensors", {"format": "pt"})
    return quantised, plain
