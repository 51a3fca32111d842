"""Gated delta nets, states and steps with random contents, for the tests of every form."""

import torch
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.linear_attention.gated_delta_net import GatedDeltaNet


def make_net(
    dtype: torch.dtype,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    batch_invariant: bool = False,
    kind: str = "qwen",
) -> GatedDeltaNet:
    """`kind`: "qwen"; "olmo", whose betas are up to 2; "kimi", with a decay for each channel and a sigmoid gate."""
    random = torch.Generator(torch.get_default_device()).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return GatedDeltaNet(
        conv=draw(channels, 4).to(dtype),
        a_log=draw(value_heads),
        dt_bias=draw(*((value_heads, key_dim) if kind == "kimi" else (value_heads,))).to(dtype),
        norm=(1 + 0.1 * draw(value_dim)).to(dtype),
        eps=1e-6,
        key_heads=key_heads,
        key_dim=key_dim,
        batch_invariant=batch_invariant,
        beta_scale=2.0 if kind == "olmo" else 1.0,
        has_sigmoid_gate=kind == "kimi",
    )


def make_state(net: GatedDeltaNet, slots: int, dtype: torch.dtype) -> RecurrentState:
    """Slots full of what an earlier sequence may have left."""
    return RecurrentState(
        torch.full((slots, net.conv.shape[1] - 1, net.channels), 3.0, dtype=dtype),
        torch.full((slots, net.value_heads, net.key_dim, net.value_dim), 5.0),
    )


def make_inputs(net: GatedDeltaNet, tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)
    width = net.channels + net.value_heads * net.value_dim
    qkvz = torch.randn(tokens, width + 3, generator=random).to(dtype)[:, :width]  # rows are strided
    return qkvz, torch.randn(tokens, net.value_heads + net.dt_bias.numel(), generator=random).to(dtype)


def rows_of(*sequences: tuple[int, int, int]) -> StateRows:
    """`sequences`: (slot, tokens before, tokens of the step); -1 before: padding."""
    slots, before, counts = zip(*sequences, strict=True)
    ends = torch.tensor([0, *counts]).cumsum(0)
    lens = [b + c if b >= 0 else 0 for b, c in zip(before, counts, strict=True)]
    return StateRows(torch.tensor(slots), torch.tensor(lens, dtype=torch.int32), ends.to(torch.int32))
