"""The modules that speak to other ranks: each wraps what transformers built, cut to this rank's part.

A column-parallel linear is a plain linear and needs no wrapper. These modules do not know what they are part of;
sharding.py gives out the roles.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.checkpoint.sharding_plan import Role, ShardingPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.distributed.tp_shard import TpShard


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r @ W_r^T, + bias once."""

    def __init__(self, linear: nn.Module, bias: Tensor | None, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.linear(x))

    def reduce(self, part: Tensor) -> Tensor:
        """The whole of y, from this rank's part of the sum."""
        y = self._communicator.all_reduce(part)
        return y if self.bias is None else y + self.bias


class TensorParallelExperts(nn.Module):
    """Every rank runs all experts on its part of their inner size; the outputs are added."""

    def __init__(self, experts: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.experts = experts
        self._communicator = communicator

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._communicator.all_reduce(self.experts(*args, **kwargs))


class VocabParallelEmbedding(nn.Module):
    """Looks up the rows that this rank holds; the others' count as zero in the sum."""

    def __init__(self, embedding: nn.Module, cut: TensorSlice, communicator: Communicator) -> None:
        super().__init__()
        self.embedding = embedding
        self.first = cut.ranges[0][0]
        self.rows = cut.size
        self._communicator = communicator

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        out: Tensor = self.embedding(local.masked_fill(elsewhere, 0))
        return self._communicator.all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


class ParallelLmHead(nn.Module):
    """Every rank computes the logits of its rows; all ranks get all logits."""

    def __init__(self, linear: nn.Module, vocab_size: int, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size
        self.part = -(-vocab_size // communicator.size)
        self._communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        if logits.shape[-1] < self.part:  # the last rank's part may be shorter
            logits = nn.functional.pad(logits, (0, self.part - logits.shape[-1]))
        return self._communicator.all_gather(logits)[..., : self.vocab_size]


class ParallelRmsNorm(nn.Module):
    """RMS norm over all heads of all ranks: the mean of the ranks' mean squares.

    It holds also where ranks share a KV head: every head is then counted equally often.
    """

    def __init__(self, weight: Tensor, eps: float, communicator: Communicator) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = self._communicator.all_reduce(wide.pow(2).mean(-1, keepdim=True)) / self._communicator.size
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype)


def apply_tensor_parallel(
    model: nn.Module, plan: ShardingPlan, calls: list[AttentionLayer], vocab_size: int, communicator: Communicator
) -> None:
    """Wraps every module that has a role; the parameters are this rank's already."""
    for call in calls:
        _count_local_heads(model.get_submodule(call.module), call, TpShard(communicator.rank, communicator.size))
    for name, role in plan.roles.items():
        parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        module = getattr(parent, leaf)
        match role:
            case Role.ROW:
                bias, module.bias = module.bias, None
                wrapped: nn.Module = RowParallelLinear(module, bias, communicator)
            case Role.EXPERTS:
                wrapped = TensorParallelExperts(module, communicator)
            case Role.EMBEDDING:
                wrapped = VocabParallelEmbedding(module, plan.cuts[f"{name}.weight"], communicator)
            case Role.HEAD:
                wrapped = ParallelLmHead(module, vocab_size, communicator)
            case Role.HEADS_NORM:
                eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
                wrapped = ParallelRmsNorm(module.weight, eps, communicator)
        setattr(parent, leaf, wrapped)


def _count_local_heads(attention: nn.Module, call: AttentionLayer, shard: TpShard) -> None:
    """Tells an attention module how many heads it has here: phi3 splits its fused projection by these counts."""
    heads, kv_heads = shard.local_heads(call)
    # Its own copy: rotary and the other layers must go on seeing the model's real shape.
    attention.config = copy(attention.config)
    for owner in (attention, attention.config):
        for name, count in (("num_attention_heads", heads), ("num_heads", heads), ("num_key_value_heads", kv_heads)):
            if hasattr(owner, name):
                setattr(owner, name, count)
