"""y = x @ weight^T + bias, with the weight in whatever form the machine reads fastest.

Shapes: weight [out_features, in_features], bias [out_features] or None, x [..., in_features], y [..., out_features].
On CPU in bfloat16 and float32 the weight is packed once into oneDNN's blocked form; the plain one is dropped, so that
memory is not held twice. Elsewhere it is `F.linear`. The module does not know about ranks: a shard is just a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .launch_check import refuse, want_device, want_dtype, want_shape


class PackedLinear(nn.Module):
    """A linear layer for inference. `weight_shape` stays readable after the plain weight is gone."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if weight.dim() != 2:
            refuse("weight", "shape [out_features, in_features]", list(weight.shape))
        if bias is not None:
            want_shape("bias", bias, (weight.shape[0],))
            want_dtype("bias", bias, weight.dtype)
            want_device("bias", bias, weight.device)
        self.weight_shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        weight = weight.detach()
        self._onednn = (
            weight.device.type == "cpu"
            and weight.dtype in (torch.bfloat16, torch.float32)
            and torch._C._has_mkldnn
        )
        if self._onednn:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype or x.shape[-1] != self.weight_shape[1]:
            refuse("x", f"[..., {self.weight_shape[1]}] of {self.dtype}", f"{list(x.shape)} of {x.dtype}")
        if not self._onednn:
            return F.linear(x, self._weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y

    def warm(self, row_counts: list[int]) -> None:
        """Run each row count once, so that no request pays for building a primitive."""
        for rows in row_counts:
            self(torch.zeros(rows, self.weight_shape[1], dtype=self.dtype, device=self._weight.device))
