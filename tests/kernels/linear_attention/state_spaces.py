"""Short convolutions and Mamba-2 mixers, states and steps with random contents, for the tests of every form."""

from collections.abc import Callable

import torch
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.kernels.linear_attention.mamba2 import GatedNorm, Mamba2
from coatcheck.kernels.linear_attention.short_conv import Convolution, ShortConv

Layer = ShortConv | Mamba2
Make = Callable[[torch.dtype], Layer]


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed))


def make_conv(channels: int, taps: int, dtype: torch.dtype, *, has_bias: bool = True) -> Convolution:
    return Convolution(draw(channels, taps).to(dtype), draw(channels).to(dtype) if has_bias else None)


def make_mamba(
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    groups: int,
    size: int,
    norm: tuple[int, bool] | None,
    *,
    dt_limits: tuple[float, float] = (0.1, 0.9),
    has_bias: bool = True,
    batch_invariant: bool = False,
    taps: int = 4,
    has_gate: bool = True,
) -> Mamba2:
    """`norm`: (groups of the norm, whether it is before the gate). `taps`: tokens that the convolution reads."""
    inner = heads * head_dim
    return Mamba2(
        conv=make_conv(inner + 2 * groups * size, taps, dtype, has_bias=has_bias),
        a_log=draw(heads),
        dt_bias=draw(heads, seed=2).to(dtype),
        skip=draw(heads, seed=3).to(dtype),
        norm=norm and GatedNorm((1 + 0.1 * draw(inner)).to(dtype), 1e-5, *norm),
        dt_limits=dt_limits,
        groups=groups,
        head_dim=head_dim,
        state_size=size,
        batch_invariant=batch_invariant,
        has_gate=has_gate,
    )


LAYERS: dict[str, Make] = {
    "short convolution": lambda dtype: ShortConv(make_conv(144, 3, dtype, has_bias=False)),
    "short convolution with bias": lambda dtype: ShortConv(make_conv(32, 5, dtype)),
    "gate, then one norm": lambda dtype: make_mamba(dtype, 4, 24, 1, 32, (1, False)),
    "norm of groups, then gate": lambda dtype: make_mamba(dtype, 4, 16, 2, 16, (2, True)),
    "no norm": lambda dtype: make_mamba(dtype, 3, 16, 1, 48, None),
    "no gate, one tap": lambda dtype: make_mamba(dtype, 3, 16, 3, 16, None, taps=1, has_gate=False),
}


def width_of(layer: Layer) -> int:
    """Columns of a row."""
    conv = layer.conv
    return 3 * conv.channels if isinstance(layer, ShortConv) else layer.inner + conv.channels + layer.heads


def make_state(layer: Layer, slots: int, dtype: torch.dtype) -> RecurrentState:
    """Slots full of what an earlier sequence may have left."""
    matrix = (layer.heads, layer.head_dim, layer.state_size) if isinstance(layer, Mamba2) else None
    return RecurrentState(
        torch.full((slots, *layer.conv.window), 3.0, dtype=dtype),
        None if matrix is None else torch.full((slots, *matrix), 5.0),
    )


def make_inputs(layer: Layer, tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return draw(tokens, width_of(layer) + 3, seed=seed).to(dtype)[:, : width_of(layer)]  # rows are strided
