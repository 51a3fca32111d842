"""RoPE: frequencies that do not depend on the other requests of a step, and a table of cos and sin on CPUs.

transformers chooses the frequencies of longrope and dynamic NTK by the largest position in the batch. An answer would
then depend on the other requests, and cached keys would not match new ones. Here the frequencies are fixed at load:
longrope takes its long factors if max_model_len exceeds the original length, and dynamic NTK computes its base for
max_model_len. So cos and sin depend on the position alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.model.model_rules import resolve_max_model_len

# The most positions of a table. A step with later positions computes cos and sin itself: a table for a context of a
# million tokens could take 1 GiB.
_TABLE_POSITIONS: Final = 32768
_LEAST_TABLE: Final = 2048  # positions


class CosSinTable:
    """cos and sin of the positions up to the largest one so far, computed once. For CPUs.

    To compute them in each step takes ten operations of torch, which wake its other threads: 0.06 to 0.33 ms of a
    decode step (bench/LOG.md, "What a decode step does outside the C kernels"). `compute`: positions [T] -> (cos, sin),
    each [T, rot_dim].
    """

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._compute = compute
        self._size = 0
        self._cos = self._sin = torch.empty(0)

    def rows(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, rot_dim], of positions, int64 [T], all below `end`."""
        if end > _TABLE_POSITIONS:
            return self._compute(positions)
        if end > self._size:
            self._size = max(_LEAST_TABLE, 1 << (end - 1).bit_length())
            self._cos, self._sin = self._compute(torch.arange(self._size))
        return self._cos[positions], self._sin[positions]


class NoRotation:
    """Stands for the rotary module of a latent attention without positions (kimi_linear): rotating by its tables
    changes no bit. `dim`: elements of a rotary key."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [1, T] -> cos and sin, each [1, T, dim], with the dtype of `like`."""
        cos = like.new_ones((*positions.shape, self._dim))
        return cos, torch.zeros_like(cos)


def rotary_module(base: Any) -> Any:
    """The module that computes cos and sin for the layers of transformers' base model."""
    return base.rotary_emb if hasattr(base, "rotary_emb") else NoRotation(base.config.qk_rope_head_dim)


def choose_max_model_len(config: Any, requested: int | None) -> int:
    """See resolve_max_model_len. Raises InvalidModel if the config has no max_position_embeddings."""
    trained = getattr(config, "max_position_embeddings", None)
    if not trained:
        raise InvalidModel(f"{config.model_type}: config.json has no max_position_embeddings; add it")
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = parameters if "rope_type" in parameters else {}
    return resolve_max_model_len(requested, trained, scaling, getattr(config, "index_topk", None))


def pin_rope_scaling(model: PreTrainedModel, max_model_len: int) -> None:
    """Set the frequencies of every rotary module to those of `max_model_len`, and keep its forward from changing
    them."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if type(module).__name__ == "PhimoeRotaryEmbedding":
            _pin_phimoe(module, max_model_len)
        elif isinstance(rope_type, str):
            module.__dict__["rope_type"] = _pin_frequencies(module, rope_type, "", None, max_model_len)
        elif isinstance(rope_type, dict):  # by layer type, as in gemma3
            for layer_type, kind in rope_type.items():
                rope_type[layer_type] = _pin_frequencies(module, kind, f"{layer_type}_", layer_type, max_model_len)


def _pin_frequencies(module: nn.Module, rope_type: str, prefix: str, layer_type: str | None, max_model_len: int) -> str:
    """Compute inv_freq for `max_model_len`, if the rope_type depends on it. Returns the rope_type to set: with
    "default" the module's forward does not recompute inv_freq."""
    if rope_type != "longrope" and "dynamic" not in rope_type:
        return rope_type
    buffer = getattr(module, f"{prefix}inv_freq")
    layer: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, buffer.device, seq_len=max_model_len, **layer)
    with torch.no_grad():
        buffer.copy_(inv_freq)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return "default"


def _pin_phimoe(module: Any, max_model_len: int) -> None:
    """phimoe computes its frequencies in every forward pass, on the host, where no CUDA graph can capture it. With
    longrope it scales cos and sin by the largest position of the batch. Both are fixed here. transformers always takes
    the short factors."""
    parameters = module.config.rope_parameters
    inv_freq, scale = module.rope_init_fn(module.config)
    if parameters["rope_type"] != "default":
        is_long = max_model_len > parameters["original_max_position_embeddings"]
        scale = parameters["long_mscale" if is_long else "short_mscale"]
    with torch.no_grad():
        module.inv_freq.copy_(inv_freq)
    module.forward = partial(_cos_and_sin, module, float(scale))


def _cos_and_sin(module: Any, scale: float, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """x: any tensor of the model's dtype. position_ids [1, T] -> cos and sin, each [1, T, dim]."""
    angles = position_ids[..., None].float() * module.inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
