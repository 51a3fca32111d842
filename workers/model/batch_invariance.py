"""Determinism: which models can promise the same bits whatever shares a step, and why the others cannot.

The promise: a request's tokens and log-probabilities are the same cold, with a cached prefix, in any chunks, after a
preemption and in any company, bit for bit, at one tp on one kind of machine. What keeps it: attention adds keys up in
one order, by absolute position (kernels/attention/paged_attention.py); linears compute rows alone or in tiles of one
height (kernels/layers/linear.py); ranks are summed in order (communicator.py); a draw depends on seed, choice and
position. This file only refuses; it does not compute.
"""

import torch
from transformers import PreTrainedModel

from coatcheck.kernels import native
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.model.fusion import is_fusable
from coatcheck.workers.model.model_rules import check_deterministic_heads, deterministic_experts_error


def check_deterministic(
    model: PreTrainedModel, calls: list[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises InvalidConfig for a model, dtype or machine that cannot keep the promise; says what would."""
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            raise deterministic_experts_error(name)
    if device.type != "cpu":
        if not is_fusable(model, calls):
            raise InvalidConfig(
                "deterministic on a GPU takes the architectures whose layers we compute ourselves, and "
                f"{model.config.model_type} is not one: torch's own norms sum in an order that the number of tokens "
                "chooses; serve it without --deterministic"
            )
        return
    if native.library() is None or dtype not in native.TYPES:
        raise InvalidConfig(
            f"deterministic on CPU takes bfloat16 or float32 and the native kernels (here: {dtype}, "
            f"{native.native_status()}); set --dtype, install with a C compiler, or leave --deterministic out"
        )
    for call in calls:
        check_deterministic_heads(call.head_dim)
