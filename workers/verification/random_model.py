"""write_random_checkpoint(): a checkpoint with random weights, for comparing our results with transformers'."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def write_random_checkpoint(config: Any, directory: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint to `directory` with transformers' own names and conversions. Returns `directory`.

    Matrices are larger than the usual initialisation, so that greedy decoding does not repeat one token. Norms and
    biases get noise too, because at their initial 1 and 0 some mistakes do not show.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config  # untyped in transformers
        model: PreTrainedModel = build(config, dtype=dtype, attn_implementation="eager")
        randomise(model)
    model.save_pretrained(directory)
    return directory


def randomise(model: PreTrainedModel) -> None:
    """Give every parameter of `model` random values from torch's global generator.

    The embedding of the padding token is zero: transformers zeroes it after loading for some types, such as youtu, and
    a tied head would then have other logits than the checkpoint's.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0
