"""write_random_checkpoint(): a checkpoint with random weights, to compare Coatcheck with transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def write_random_checkpoint(config: Any, directory: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint to `directory` with transformers' own names and conversions. Returns `directory`.

    The values of matrices are larger than initial values usually are, so that greedy decoding does not repeat one
    token. Norms and biases get noise, because at their initial 1 and 0 some mistakes do not show.
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

    The embedding of the padding token is zero. For some model types, such as youtu, transformers sets it to zero after
    loading. With another value in the checkpoint, the logits of a tied head would differ.
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
