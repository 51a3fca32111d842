"""Lightning attention between its projections: linear attention with a fixed decay for each head (2401.04658).

For each token, whose row has for each head the columns q, k and v, each head by itself:

    q, k, v = silu(q), silu(k), silu(v)     rounded to the dtype
    S = exp(-slope) * S + v k^T             this and what follows: float32
    out = S q

That is the recurrence of a Mamba-2 mixer (mamba2.py) with x = v, B = k, C = q, d = 1, a group for each head, a
convolution of one token, and neither skip, gate nor norm. Its kernels compute it.

Shapes: qkv [T, heads * 3 * head_dim]; out [T, heads * head_dim]; S [head_dim, head_dim], with rows for v and columns
for k. The state's window has no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import check_shape
from coatcheck.kernels.linear_attention.mamba2 import Mamba2
from coatcheck.kernels.linear_attention.short_conv import Convolution


class LightningAttention:
    """`slopes`: [heads], positive. `dtype`: of the rows. `batch_invariant`: as in Mamba2. Raises LaunchRefused."""

    def __init__(self, slopes: Tensor, head_dim: int, dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
        self._heads, self._head_dim = len(slopes), head_dim
        self._columns = 3 * self._heads * head_dim
        zeros = torch.zeros_like(slopes)
        self._mixer = Mamba2(
            conv=Convolution(slopes.new_ones((self._columns, 1), dtype=dtype), None),
            a_log=slopes.log(),
            dt_bias=zeros,
            skip=zeros,
            norm=None,
            dt_limits=(1.0, 1.0),
            groups=self._heads,
            head_dim=head_dim,
            state_size=head_dim,
            batch_invariant=batch_invariant,
            has_gate=False,
        )

    def __call__(self, qkv: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out. Replaces the states in the slots of `rows`. Raises LaunchRefused."""
        return self._mixer(self._mixer_rows(qkv), state, rows)

    def reference(self, qkv: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """The formula in torch, token by token."""
        return self._mixer.reference(self._mixer_rows(qkv), state, rows)

    def _mixer_rows(self, qkv: Tensor) -> Tensor:
        """The rows that Mamba2 reads: a gate that it does not apply, then v, k and q of all heads, then dt."""
        check_shape("qkv", qkv, (None, self._columns))
        inner = self._heads * self._head_dim
        wide = qkv.new_zeros((qkv.shape[0], inner + self._columns + self._heads))
        parts = wide[:, inner : inner + self._columns].unflatten(1, (3, self._heads, self._head_dim))
        q, k, v = qkv.unflatten(1, (self._heads, 3, self._head_dim)).unbind(2)
        for part, values in zip(parts.unbind(1), (v, k, q), strict=True):
            part.copy_(values)
        return wide
