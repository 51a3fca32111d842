"""Which models can be served with --deterministic, and why the others cannot.

The guarantee: with the same tp and kind of machine, a request's tokens and log-probabilities have the same bits in any
batch and any chunks, with or without a cached prefix, and after a preemption. The guarantee holds because

- attention adds keys in one order, by absolute position (kernels/attention/paged_attention.py),
- linears compute rows alone or in tiles of one height (kernels/layers/linear.py),
- all-reduces add ranks in order (communicator.py),
- a draw depends only on seed, choice and position (kernels/sampling).
"""

import torch
from transformers import PreTrainedModel

from coatcheck.kernels import native
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.model.fusion import is_fusable
from coatcheck.workers.model.model_rules import check_deterministic_heads, deterministic_experts_error


def check_deterministic(
    model: PreTrainedModel, layers: list[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise InvalidConfig for a model, dtype or machine that cannot keep the guarantee."""
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            raise deterministic_experts_error(name)
    if device.type != "cpu":
        if not is_fusable(model, layers):
            raise InvalidConfig(
                f"deterministic on a GPU is not supported for {model.config.model_type}: torch's own norms sum in an "
                "order that depends on the number of tokens, and only the architectures of our fused layers avoid "
                "them; serve it without --deterministic"
            )
        return
    if native.library() is None or dtype not in native.TYPES:
        raise InvalidConfig(
            f"deterministic on CPU needs bfloat16 or float32 and the native kernels (here: {dtype}, "
            f"{native.native_status()}); set --dtype, install with a C compiler, or leave --deterministic out"
        )
    for layer in layers:
        check_deterministic_heads(layer.head_dim)
