"""y[t, h] = x[t, h] @ weight[h]^T: one linear for each attention head, as latent attention (MLA) needs them.

Shapes: weight [heads, out_features, in_features]; x [rows, heads, in_features] and y [rows, heads, out_features], any
strides over rows and heads. All heads may share one x, expanded with stride 0.

The forms are two of those of linear.py: native (panels for the C library, which computes the heads in parallel) and
plain (`torch.bmm`). In the native form a row's result does not depend on the other rows. With `batch_invariant` the
plain form uses invariant_linear.py on a GPU; on a CPU it calls `torch.bmm` with a fixed number of rows, padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_device, check_dtype, check_shape, refuse
from coatcheck.kernels.layers.invariant_linear import invariant_heads_linear
from coatcheck.kernels.layers.linear import ROW_TILE, pack_panels, pick_form, scratch, scratch_size


class HeadsLinear:
    """Drops the plain weight in the native form. `weight_shape`: [heads, out_features, in_features]."""

    def __init__(self, weight: Tensor, *, batch_invariant: bool = False) -> None:
        if weight.dim() != 3:
            refuse("weight", "shape [heads, out_features, in_features]", list(weight.shape))
        self.weight_shape = (weight.shape[0], weight.shape[1], weight.shape[2])
        self.dtype, self.device = weight.dtype, weight.device
        self.batch_invariant = batch_invariant
        self.form = "native" if pick_form(weight[0]) == "native" else "plain"
        if self.form == "native":
            self._weight = torch.stack([pack_panels(head.detach()) for head in weight])
        else:
            self._weight = weight.detach()

    def __call__(self, x: Tensor, out: Tensor | None = None, heads: slice = slice(None)) -> Tensor:
        """y. `out`: where y is written, by default a new contiguous tensor. `heads`: the heads whose weights x meets;
        x and y have those heads alone. Raises LaunchRefused."""
        first, last, _ = heads.indices(self.weight_shape[0])
        _, features, depth = self.weight_shape
        rows = x.shape[0]
        check_shape("x", x, (None, last - first, depth))
        if out is None:
            out = torch.empty((rows, last - first, features), dtype=self.dtype, device=self.device)
        check_shape("out", out, (rows, last - first, features))
        for name, tensor in (("x", x), ("out", out)):
            check_dtype(name, tensor, self.dtype)
            check_device(name, tensor, self.device)
            if tensor.stride(2) != 1:
                refuse(name, "a last dimension with stride 1", f"strides {tensor.stride()}")
        if self.form == "native":
            self._launch(x, out, first, last)
        elif self.batch_invariant and uses_triton(x):
            invariant_heads_linear(self._weight[first:last], x, out)
        elif self.batch_invariant:
            for x_tile, out_tile in zip(x.split(ROW_TILE), out.split(ROW_TILE), strict=True):
                padded = F.pad(x_tile, (0, 0, 0, 0, 0, ROW_TILE - len(x_tile)))
                out_tile.copy_(self._product(padded, first, last)[: len(x_tile)])
        else:
            out.copy_(self._product(x, first, last))
        return out

    def _product(self, x: Tensor, first: int, last: int) -> Tensor:
        product: Tensor = torch.bmm(x.transpose(0, 1), self._weight[first:last].transpose(1, 2))
        return product.transpose(0, 1)

    def _launch(self, x: Tensor, out: Tensor, first: int, last: int) -> None:
        library = native.library()
        assert library is not None, "the native form is only picked where the library is"
        _, features, depth = self.weight_shape
        head_bytes = self._weight.stride(0) * 4
        own_scratch = -(-scratch_size(x.shape[0], depth) // 64) * 64  # bytes of one thread, in whole cache lines
        library.heads_linear(
            library.kernels,
            native.HEADS_LINEAR.pack(
                x.data_ptr(), x.stride(0), x.stride(1), out.data_ptr(), out.stride(0), out.stride(1),
                self._weight.data_ptr() + first * head_bytes, head_bytes, last - first, x.shape[0], features, depth,
                native.TYPES[self.dtype], scratch(own_scratch * torch.get_num_threads()), own_scratch,
            ),
        )  # fmt: skip


def heads_linear_reference(weight: Tensor, x: Tensor) -> Tensor:
    """The formula in float32."""
    return torch.einsum("thi,hoi->tho", x.float(), weight.float())
