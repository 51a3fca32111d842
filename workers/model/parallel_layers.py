"""Tensor-parallel modules: each wraps a module of transformers that holds one rank's slices.

`apply_tensor_parallel` wraps the modules that have a role in the sharding plan. A column-parallel linear needs no
wrapper: it is a plain linear with fewer rows.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from coatcheck.kernels.layers.all_reduce_norm import all_reduce_add_norm, all_reduce_add_norm_and_quantise
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, RowFormat
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.checkpoint.sharding_plan import ParallelRole, ShardingPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tensor_slice import TensorSlice


def apply_tensor_parallel(
    model: nn.Module,
    plan: ShardingPlan,
    layers: Sequence[AttentionLayer],
    vocab_size: int,
    communicator: Communicator,
) -> None:
    """Wrap every module that has a role in `plan`. The parameters must hold this rank's slices already.

    `layers`: with this rank's heads.
    """
    for layer in layers:
        _set_local_heads(model.get_submodule(layer.module), layer)
    for name, role in plan.roles.items():
        parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        module = getattr(parent, leaf)
        match role:
            case ParallelRole.ROW:
                bias, module.bias = module.bias, None
                wrapped: nn.Module = RowParallelLinear(module, bias, communicator)
            case ParallelRole.EXPERTS:
                part = plan.slices[f"{name}.down_proj"]
                is_whole = part.dim == 0  # a rank holds whole experts
                if communicator.rank and not is_whole and hasattr(module, "down_proj_bias"):
                    module.down_proj_bias.data.zero_()  # only rank 0 adds the bias: the all-reduce sums the outputs
                wrapped = TensorParallelExperts(module, communicator, first=part.ranges[0][0] if is_whole else 0)
            case ParallelRole.EMBEDDING:
                wrapped = VocabParallelEmbedding(module, plan.slices[f"{name}.weight"], communicator)
            case ParallelRole.LM_HEAD:
                wrapped = ParallelLmHead(module, vocab_size, communicator)
            case ParallelRole.QK_NORM:
                eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
                wrapped = ParallelRmsNorm(module.weight, eps, communicator)
        setattr(parent, leaf, wrapped)


def _set_local_heads(attention: nn.Module, layer: AttentionLayer) -> None:
    """Set an attention module's head counts to this rank's: phi3 splits its fused projection by them."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    attention.config = copy(attention.config)  # RoPE and the other layers read the unsharded counts from the original
    for owner in (attention, attention.config):
        for name, count in (("num_attention_heads", heads), ("num_heads", heads), ("num_key_value_heads", kv_heads)):
            if _has_one_value(owner, name):
                setattr(owner, name, count)


def _has_one_value(owner: Any, name: str) -> bool:
    """Whether `owner` has an attribute `name` with one value for all layers."""
    try:
        return hasattr(owner, name)
    except RuntimeError:  # raised by Gemma 4's config, because its layers have different numbers of KV heads
        return False


class RankSum:
    """The all-reduce after a row-parallel linear: adds the ranks' partial results [T, hidden], and a bias if given."""

    def __init__(self, communicator: Communicator, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._communicator = communicator

    def __call__(self, partial: Tensor) -> Tensor:
        """The sum [T, hidden]. It may be written into `partial`."""
        y = self._communicator.all_reduce(partial)
        return y if self.bias is None else y + self.bias

    def add_and_norm(self, partial: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """(norm(sum + residual), sum + residual), both [T, hidden]. On GPUs with peer memory one kernel computes both
        for few tokens."""
        peers = self._communicator.peer_memory_for(partial) if self.bias is None else None
        if peers is None:
            return norm.add_and_norm(self(partial), residual)
        return all_reduce_add_norm(partial, residual, norm, peers)

    def add_norm_and_quantise(
        self, partial: Tensor, residual: Tensor, norm: RmsNorm, format: RowFormat, *, keeps_plain: bool = False
    ) -> tuple[QuantisedRows, Tensor]:
        """As `add_and_norm`, with the norm's output quantised to `format`. `keeps_plain`: hold it unquantised, too."""
        peers = self._communicator.peer_memory_for(partial) if self.bias is None else None
        if peers is None:
            return norm.add_norm_and_quantise(self(partial), residual, format, keeps_plain=keeps_plain)
        return all_reduce_add_norm_and_quantise(partial, residual, norm, peers, format, keeps_plain=keeps_plain)


def norm_for_linear(
    norm: RmsNorm, x: Tensor, residual: Tensor | None, deferred_sum: RankSum | None, format: RowFormat | None, *,
    keeps_plain: bool = False,
) -> tuple[Tensor | QuantisedRows, Tensor]:  # fmt: skip
    """(norm(x + residual), x + residual), or (norm(x), x) without a residual. The norm's output is quantised to
    `format`.

    `format`: of the linear that reads the norm's output; None: plain. `keeps_plain`: hold it unquantised, too.
    `deferred_sum`: the all-reduce that `x` still needs; None without a residual.
    """
    if format is None:
        return (norm(x), x) if residual is None else add_and_norm(norm, x, residual, deferred_sum)
    if deferred_sum is None or residual is None:
        return norm.add_norm_and_quantise(x, residual, format, keeps_plain=keeps_plain)
    return deferred_sum.add_norm_and_quantise(x, residual, norm, format, keeps_plain=keeps_plain)


def add_and_norm(norm: RmsNorm, x: Tensor, residual: Tensor, deferred_sum: RankSum | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual). `deferred_sum`: the all-reduce that `x` still needs."""
    return norm.add_and_norm(x, residual) if deferred_sum is None else deferred_sum.add_and_norm(x, residual, norm)


class RowParallelLinear(nn.Module):
    """y = all_reduce(x_rank @ W_rank^T) + bias."""

    def __init__(self, linear: nn.Module, bias: Tensor | None, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self.reduce = RankSum(communicator, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.linear(x))


class TensorParallelExperts(nn.Module):
    """A rank's part of the experts, with an all-reduce of the outputs.

    Each rank has its part of the intermediate size of all experts. With --expert-parallel it has some experts whole;
    `first` is the id of the first one.
    """

    def __init__(self, experts: nn.Module, communicator: Communicator, *, first: int) -> None:
        super().__init__()
        self.experts = experts
        self.first = first
        self.rank = communicator.rank
        self.reduce = RankSum(communicator)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.reduce(self.experts(*args, **kwargs))


class VocabParallelEmbedding(nn.Module):
    """Looks up the ids among this rank's rows, takes zeros for all other ids, and all-reduces."""

    def __init__(self, embedding: nn.Module, rows: TensorSlice, communicator: Communicator) -> None:
        super().__init__()
        self.embedding = embedding
        self.first = rows.ranges[0][0]
        self.rows = rows.size
        self._communicator = communicator

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        is_elsewhere = (local < 0) | (local >= self.rows)
        out: Tensor = self.embedding(local.masked_fill(is_elsewhere, 0))
        return self._communicator.all_reduce(out.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0))


class ParallelLmHead(nn.Module):
    """Every rank computes the logits of its rows of the vocabulary. An all-gather gives all ranks all logits.

    `gathers`: if False, there is no all-gather, and the result is this rank's logits alone, [..., its rows].
    """

    def __init__(self, linear: nn.Module, vocab_size: int, communicator: Communicator) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size
        self.part = -(-vocab_size // communicator.size)
        self.gathers = True
        self._communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        if not self.gathers:
            return logits
        if logits.shape[-1] < self.part:  # the last rank's part may be shorter
            logits = nn.functional.pad(logits, (0, self.part - logits.shape[-1]))
        return self._communicator.all_gather(logits)[..., : self.vocab_size]


class ParallelRmsNorm(nn.Module):
    """RMS norm over the heads of all ranks, from the average of the ranks' mean squares.

    It is exact even if several ranks hold the same KV head, because then every head is held equally often.
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
