"""Writes LoRA adapters with the layout that PEFT publishes, and merges them into their base model as a reference."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

ALL_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("in_proj", "out_proj"),  # of mixers with a state
)


def write_adapter(
    base: Path,
    path: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    linears: Sequence[str] = ALL_LINEARS,
    layers: Sequence[int] = (0, 1),
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A random adapter for these linears of `base`. `config`: further fields of adapter_config.json."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        is_chosen = name.rpartition(".")[2] in linears and any(f".layers.{layer}." in name for layer in layers)
        if isinstance(module, nn.Linear) and is_chosen:
            prefix, out, width = f"base_model.model.{name}", module.out_features, module.in_features
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width, generator=generator).to(dtype) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator).to(dtype) * 0.1
    assert tensors, "the base model has none of these linears"
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": [*linears], **config}))
    return path


def merged_model(base: Path, adapter: Path | None, *, scale: float = 2.0) -> Any:
    """transformers' model with the adapter in its weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                b = tensors[key.replace("lora_A", "lora_B")]
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                linear: Any = model.get_submodule(name)
                linear.weight.data += scale * b.float() @ a.float()
    return model


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' greedy tokens, which no end token ends."""
    ids = torch.tensor([[*prompt]])
    model.generation_config.eos_token_id = None
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
