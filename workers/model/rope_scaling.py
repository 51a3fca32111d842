"""Rotary frequencies, fixed when a model is loaded.

transformers' longrope and dynamic scalings choose frequencies by the largest position in the batch: a neighbour would
change the answer, and cached keys would disagree with new ones. Here `max_model_len` chooses, once: longrope takes its
long factors where max_model_len exceeds the original length, dynamic NTK the base for max_model_len. It does not know
attention.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.model.model_rules import limit_max_model_len


def choose_max_model_len(config: Any, asked: int | None) -> int:
    """As `limit_max_model_len`; raises InvalidModel if the config has no max_position_embeddings."""
    made_for = getattr(config, "max_position_embeddings", None)
    if not made_for:
        raise InvalidModel(f"{config.model_type}: config.json has no max_position_embeddings; add it")
    return limit_max_model_len(asked, made_for, _flat_parameters(config))


def pin_rotary(model: PreTrainedModel, max_model_len: int) -> None:
    """Gives every rotary module the frequencies of `max_model_len`, and stops it from choosing others."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.__dict__["rope_type"] = _pin(module, kinds, "", None, max_model_len)
        elif isinstance(kinds, dict):  # one per layer type, as gemma3 has
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _pin(module, kind, f"{layer_type}_", layer_type, max_model_len)


def _pin(module: nn.Module, kind: str, prefix: str, layer_type: str | None, max_model_len: int) -> str:
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    buffer = getattr(module, f"{prefix}inv_freq")
    choice: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=max_model_len, **choice)
    with torch.no_grad():
        buffer.copy_(inv_freq)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return "default"  # the name that its forward leaves alone


def _flat_parameters(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters if "rope_type" in parameters else {}
