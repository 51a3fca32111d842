"""y = x @ weight^T + bias, with the weight in the fastest layout for the machine.

Shapes: weight [out_features, in_features], bias [out_features] or None, x [..., in_features] (rows may be strided),
y [..., out_features], dense. The weight is packed once and the plain weight dropped, so that memory holds it once:

    native   CPU with the C library, bfloat16 or float32: panels of 16 features (kernels/csrc/linear.h)
    onednn   CPU without it, or of a kind for which it has no instruction class: oneDNN's blocked form
    plain    everything else: `F.linear`

In the native form a row's result does not depend on the other rows of the call. Libraries choose the order of a sum by
the number of rows; `batch_invariant` calls them with a fixed number of rows, padded, so that results are the same bits
in every form.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coatcheck.kernels import huge_pages, native
from coatcheck.kernels.launch_check import check_device, check_dtype, check_shape, refuse

# With `batch_invariant`: enough to keep a matrix unit busy, few enough that a decode step still waits for memory first.
ROW_TILE = 64


class PackedLinear(nn.Module):
    """A linear layer for inference. Keeps `weight_shape` and `form` after dropping the plain weight."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        if weight.dim() != 2:
            refuse("weight", "shape [out_features, in_features]", list(weight.shape))
        if bias is not None:
            check_shape("bias", bias, (weight.shape[0],))
            check_dtype("bias", bias, weight.dtype)
            check_device("bias", bias, weight.device)
        self.weight_shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device
        self.form = pick_form(weight)
        self.register_buffer("bias", None if bias is None else bias.detach().contiguous(), persistent=False)
        # Plain attributes, not buffers, because a packed weight must not be moved, cast or saved as a weight.
        self._weight = _pack(weight.detach(), self.form)
        self._bias_pointer = 0 if self.bias is None else self.bias.data_ptr()
        self._pointer = self._weight.data_ptr() if self.form == "native" else 0
        library = native.library()
        if self.form == "native" and library is not None:
            self._call = library.linear[weight.dtype]

    def forward(self, x: Tensor) -> Tensor:
        features, depth = self.weight_shape
        if x.dtype != self.dtype or x.shape[-1] != depth or x.device != self.device:
            have = f"{list(x.shape)} of {x.dtype} on {x.device}"
            refuse("x", f"[..., {depth}] of {self.dtype} on {self.device}, as the weight is", have)
        if self.form != "native":
            return self._in_tiles(x) if self.batch_invariant else self._product(x)
        rows = x if x.dim() == 2 and (x.stride(1) == 1 or depth == 1) else x.reshape(-1, depth).contiguous()
        count = rows.shape[0]
        y = torch.empty((*x.shape[:-1], features), dtype=self.dtype)
        self._call(
            native.LINEAR.pack(
                rows.data_ptr(), rows.stride(0), count, self._pointer, self._bias_pointer, features, depth,
                y.data_ptr(), features, scratch(scratch_size(count, depth)), 0,
            )
        )  # fmt: skip
        return y

    def _product(self, x: Tensor) -> Tensor:
        if self.form == "plain":
            return F.linear(x, self._weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y

    def _in_tiles(self, x: Tensor) -> Tensor:
        features, depth = self.weight_shape
        rows = x.reshape(-1, depth)
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % ROW_TILE))
        tiles = [self._product(tile.contiguous()) for tile in padded.split(ROW_TILE)] if count else []
        y = torch.cat(tiles)[:count] if tiles else rows.new_empty((0, features))
        return y.reshape(*x.shape[:-1], features)

    @property
    def pointers(self) -> tuple[int, int]:
        """Addresses of the native form's panels and of the bias (0: none). Valid while this module lives."""
        return self._pointer, self._bias_pointer


def pick_form(weight: Tensor) -> str:
    if weight.device.type != "cpu" or weight.dtype not in native.TYPES:
        return "plain"
    library = native.library()
    if library is not None and (library.cpu_class != "generic" or library.is_chosen):
        return "native"
    return "onednn" if torch._C._has_mkldnn else "native" if library is not None else "plain"


def _pack(weight: Tensor, form: str) -> Tensor:
    if form == "plain":
        return weight
    weight = weight.contiguous()
    if form == "onednn":
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return packed
    library = native.library()
    assert library is not None, "the native form is only picked where the library is"
    features, depth = weight.shape
    # As panels_of and words_of in kernels/csrc/linear.h.
    panels, words = -(-features // 64) * 4, depth if weight.dtype == torch.float32 else -(-depth // 32) * 16
    packed = huge_pages.empty((panels, words, 16), torch.int32)
    library.pack_weight(weight.data_ptr(), features, depth, packed.data_ptr(), native.TYPES[weight.dtype])
    return packed


def scratch_size(rows: int, depth: int) -> int:
    """Bytes in which the native form repacks x."""
    return (rows + 15) * (depth + 31) * 4


_local = threading.local()


def scratch(size: int) -> int:
    """The address of at least `size` bytes for this thread's native calls: one buffer that grows."""
    held: Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < size:
        held = _local.scratch = torch.empty(max(size, 1 << 20), dtype=torch.uint8)
    return held.data_ptr()
