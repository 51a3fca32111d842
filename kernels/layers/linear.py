"""y = x @ weight^T + bias, with the weight in the fastest layout for the machine.

Shapes: weight [out_features, in_features], bias [out_features] or None, x [..., in_features] (rows may be strided),
y [..., out_features], contiguous. The weight is packed once and the plain weight dropped, so that memory holds it once:

    native   CPU with the C library, bfloat16 or float32: panels of 16 features (kernels/csrc/linear.h)
    onednn   CPU without the C library, or for which it has only its generic kernels: oneDNN's blocked form
    triton   GPU, a QuantisedWeight: quantised_linear.py, or with quantised activations w8a8_linear.py. The first leaves
             many rows to a library, with the dequantised weight, but not with `batch_invariant`.
    plain    everything else: `F.linear`, or on a GPU with `batch_invariant` invariant_linear.py

A QuantisedWeight stays quantised in the native and triton forms, if `holds_quantised` says so; the other forms
dequantise it. In the native form a row's result does not depend on the other rows of the call. Other libraries choose
the order of a sum by the number of rows. With `batch_invariant` a row's bits do not depend on the other rows in any
form: on a GPU Triton's kernels fix the order, on a CPU libraries get a fixed number of rows, padded.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coatcheck.kernels import huge_pages, native
from coatcheck.kernels.gpu_properties import TRITON_DEVICES, gpu_properties
from coatcheck.kernels.launch_check import check_device, check_dtype, check_shape, refuse
from coatcheck.kernels.layers import invariant_linear
from coatcheck.kernels.layers.quantised_linear import (
    MANY,
    WARM_UP_ROWS,
    Codes,
    dequantise_rows,
    pack_codes,
    pick_step,
    quantised_linear,
)
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, RowFormat, quantise_rows
from coatcheck.kernels.layers.quantised_weight import E8M0_NAN, CodeKind, QuantisedWeight
from coatcheck.kernels.layers.w8a8_linear import FormatChoice, choose_format, multiply_rows
from coatcheck.kernels.lora.lora_linear import LoraLinear
from coatcheck.kernels.lora.shrink_expand import StackedLora

# Rows of each call of a library on a CPU with `batch_invariant`: enough to keep matrix units busy, and so few that a
# decode step is still bound by reading the weight.
ROW_TILE = 64
_CHECKED_CODES = 16 << 20  # FP8 codes that are searched for NaN at a time
_DEQUANTISED_BYTES = 64 << 20  # of a weight, at a time
_SLICE_FEATURES = 128  # a slice has a multiple of this many features, the width of a library's tiles
_CODES_OF_WORD = 8  # codes of 4 bits in a word of 32 bits; words of 8-bit codes hold fewer


class PackedLinear(nn.Module):
    """A linear layer for inference. Keeps `weight_shape` and `form` after dropping the plain weight.

    `parts`: the tensors of the weight in its form; for a QuantisedWeight codes, scales, and, if it has them, scales of
    rows, zero points and order. `packed`: in the native form the C struct Weight, which points into `parts` and `bias`.
    `codes`: in the triton form `parts` with their sizes. `activations`: how x is quantised, or why it is not; None for
    a weight without `quantises_activations`. `padding_bytes`: how many bytes `parts` takes more than the weight itself.
    `lora`: what LoRA adapters add; None if no adapter changes this linear.
    """

    bias: Tensor | None

    def __init__(
        self, weight: Tensor | QuantisedWeight, bias: Tensor | None = None, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.activations = choose_activations(weight)
        if isinstance(weight, QuantisedWeight):
            is_held = holds_quantised(weight, weight.device)
            weight = widen_scales(weight, weight.device) if is_held else weight.dequantise()
        if len(weight.shape) != 2:
            refuse("weight", "shape [out_features, in_features]", list(weight.shape))
        if bias is not None:
            check_shape("bias", bias, (weight.shape[0],))
            check_dtype("bias", bias, weight.dtype)
            check_device("bias", bias, weight.device)
        self.weight_shape = (weight.shape[0], weight.shape[1])
        self.dtype, self.device = weight.dtype, weight.device
        self.form = pick_form(weight)
        self._has_fixed_order = batch_invariant and self.form == "plain" and self.device.type in TRITON_DEVICES
        self.register_buffer("bias", None if bias is None else bias.detach().contiguous(), persistent=False)
        # Plain attributes, not buffers, because a packed weight must not be moved, cast or saved as a weight.
        self.parts: tuple[Tensor, ...] = ()
        self.codes: Codes | None = None
        self.packed = b""
        self.lora: LoraLinear | StackedLora | None = None
        if isinstance(weight, Tensor):
            self.parts = (_pack(weight, self.form),)
        elif self.form == "triton":
            self.codes = pack_codes(weight, self.row_format)
            self.parts = self.codes.parts
        else:
            self.parts = pack_quantised(weight)
        has_panels = self.form in ("native", "triton")  # oneDNN does not tell how many bytes it holds
        self.padding_bytes: int = sum(part.nbytes for part in self.parts) - weight.nbytes if has_panels else 0
        library = native.library()
        if self.form == "native" and library is not None:
            self._call = library.linear[weight.dtype]
            self.packed = weight_struct(weight, self.weight_shape, self.parts, self.bias)

    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """y. `x`: QuantisedRows if an earlier kernel has quantised x to `row_format`. Raises LaunchRefused."""
        y = self._multiply(x)
        if self.lora is not None:
            assert isinstance(x, Tensor), "adapters read x itself; see `input_format`"
            self.lora.add_to(y, x)
        return y

    def _multiply(self, x: Tensor | QuantisedRows) -> Tensor:
        features, depth = self.weight_shape
        if isinstance(x, QuantisedRows):
            if x.format != self.row_format or x.dtype != self.dtype or x.shape[1] != depth:
                have = f"{list(x.shape)} of {x.dtype} as {x.format}"
                refuse("x", f"[rows, {depth}] of {self.dtype} as {self.row_format}", have)
            assert self.codes is not None
            return multiply_rows(self.codes, x, self.bias, batch_invariant=self.batch_invariant)
        if x.dtype != self.dtype or x.shape[-1] != depth or x.device != self.device:
            have = f"{list(x.shape)} of {x.dtype} on {x.device}"
            refuse("x", f"[..., {depth}] of {self.dtype} on {self.device}, as the weight is", have)
        if self.codes is not None:
            rows = x.reshape(-1, depth).contiguous()
            if self.codes.format is not None:
                y = self._multiply(quantise_rows(rows, self.codes.format))
            elif len(rows) > MANY and not self.batch_invariant:
                y = multiply_dequantised(self.codes, rows, self.bias)
            else:
                y = quantised_linear(self.codes, rows, self.bias, batch_invariant=self.batch_invariant)
            return y.view(*x.shape[:-1], features)
        if self._has_fixed_order:
            rows = x.reshape(-1, depth).contiguous()
            return invariant_linear.invariant_linear(self.parts[0], rows, self.bias).view(*x.shape[:-1], features)
        if self.form != "native":
            return self._in_tiles(x) if self.batch_invariant else self._product(x)
        rows = x if x.dim() == 2 and (x.stride(1) == 1 or depth == 1) else x.reshape(-1, depth).contiguous()
        count = rows.shape[0]
        y = torch.empty((*x.shape[:-1], features), dtype=self.dtype)
        call = native.LINEAR.pack(
            rows.data_ptr(), rows.stride(0), count, y.data_ptr(), features, scratch(scratch_size(count, depth)), 0
        )
        self._call(self.packed + call)
        return y

    @property
    def row_format(self) -> RowFormat | None:
        """How x is quantised before the product; None: x is not quantised."""
        return None if self.activations is None else self.activations.format

    @property
    def input_format(self) -> RowFormat | None:
        """The format in which an earlier kernel may give x; None: x itself. Adapters read x itself, so a linear with
        adapters quantises x for its own product, to the same codes."""
        return None if self.lora is not None else self.row_format

    @property
    def has_adapted_rows(self) -> bool:
        """Whether some adapter changes this linear and some row of the current step has an adapter, not necessarily the
        same."""
        return self.lora is not None and self.lora.step.is_active

    @property
    def variant(self) -> object:
        """Equal for linears that share their kernels."""
        lora = self.lora.variant if isinstance(self.lora, StackedLora) else None
        if self.codes is not None:
            return self.codes.variant, self.bias is None, lora
        if self._has_fixed_order:
            return self.weight_shape, self.bias is None, lora
        return lora

    def compile_kernels(self) -> None:
        """Launch every variant of Triton's kernels once, so that none compiles later. Other forms have no kernels to
        compile."""
        lengths: tuple[int, ...] = WARM_UP_ROWS if self.form == "triton" else ()
        if self._has_fixed_order:
            lengths = invariant_linear.warm_up_rows(self.parts[0])
        for rows in lengths:
            self(torch.zeros((rows, self.weight_shape[1]), dtype=self.dtype, device=self.device))
        if isinstance(self.lora, StackedLora):
            self.lora.compile_kernels()

    def _product(self, x: Tensor) -> Tensor:
        if self.form == "plain":
            return F.linear(x, self.parts[0], self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.parts[0], self.bias, "none", [], "")
        return y

    def _in_tiles(self, x: Tensor) -> Tensor:
        features, depth = self.weight_shape
        rows = x.reshape(-1, depth)
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % ROW_TILE))
        tiles = [self._product(tile.contiguous()) for tile in padded.split(ROW_TILE)] if count else []
        y = torch.cat(tiles)[:count] if tiles else rows.new_empty((0, features))
        return y.reshape(*x.shape[:-1], features)


def multiply_dequantised(
    codes: Codes, x: Tensor, bias: Tensor | None, *, max_bytes: int = _DEQUANTISED_BYTES
) -> Tensor:
    """x [rows, depth] -> y by torch's library, with the dequantised weight. With many rows that is faster than the
    kernel, because dequantising takes the same time for any number of rows.

    A weight that takes more than `max_bytes` when it is dequantised is multiplied in slices of its features. A rank
    runs its largest steps before it sizes the KV pool, so the memory of a slice is allocated by then.
    """
    features, depth = codes.shape
    slices = -(-features * depth * x.element_size() // max_bytes)
    height = min(-(-features // slices // _SLICE_FEATURES) * _SLICE_FEATURES, features)
    if codes.order is not None:
        x = x.index_select(1, codes.order)
    scratch = x.new_empty((height, depth))
    if height == features:
        return F.linear(x, dequantise_rows(codes, 0, scratch), bias)
    y = x.new_empty((len(x), features))
    for first in range(0, features, height):
        to = y[:, first : first + height]
        weight = dequantise_rows(codes, first, scratch[: to.shape[1]]).T
        if bias is None:
            torch.mm(x, weight, out=to)
        else:
            torch.addmm(bias[first : first + height], x, weight, out=to)
    return y


def choose_activations(weight: Tensor | QuantisedWeight) -> FormatChoice | None:
    """How a linear over `weight` quantises x, or why it does not; None for a weight without `quantises_activations`."""
    if isinstance(weight, Tensor) or not weight.quantises_activations:
        return None
    if weight.device.type not in TRITON_DEVICES:
        return FormatChoice(None, "the kernels for CPUs take no activations of 8 bits")
    return choose_format(weight, gpu_properties(weight.device))


def pick_form(weight: Tensor | QuantisedWeight) -> str:
    """`native`, `onednn`, `triton` or `plain` (see the module's docstring)."""
    if isinstance(weight, QuantisedWeight) and weight.device.type in TRITON_DEVICES:
        return "triton"
    return _pick_form(weight.dtype) if weight.device.type == "cpu" else "plain"


def _pick_form(dtype: torch.dtype) -> str:
    """The form of a weight on a CPU."""
    if dtype not in native.TYPES:
        return "plain"
    library = native.library()
    if library is not None and (library.cpu_class != "generic" or library.is_chosen):
        return "native"
    return "onednn" if torch._C._has_mkldnn else "native" if library is not None else "plain"


def holds_quantised(weight: QuantisedWeight, device: torch.device) -> bool:
    """Whether PackedLinear keeps the weight quantised once it is on `device`.

    If a row has several groups, the C kernels need groups of whole 32-bit words of codes, Triton's kernels groups of a
    multiple of 16 columns.
    """
    if device.type in TRITON_DEVICES:
        return pick_step(weight) is not None
    is_native = device.type == "cpu" and _pick_form(weight.dtype) == "native"
    return is_native and (weight.groups == 1 or weight.group % _CODES_OF_WORD == 0)


def widen_scales(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    """`weight` with the dtype of scales that PackedLinear holds on `device`.

    On a GPU the scales of 8-bit codes with one scale per row become float32, because torch._scaled_mm reads no other
    dtype. Scales with `row_scales` do too, because Triton's kernels read none of these. Other scales keep theirs. The
    loader calls this before it counts the weight's bytes, so that it counts what the rank holds.
    """
    if device.type not in TRITON_DEVICES:
        return weight
    weight = weight.without_row_scales()
    if weight.kind.bits != 8 or weight.groups > 1:
        return weight
    return replace(weight, scales=weight.scales.float())


def _pack(weight: Tensor, form: str) -> Tensor:
    weight = weight.detach()
    if form == "plain":
        return weight
    if form == "onednn":
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return packed
    return pack_panels(weight)


def pack_panels(weight: Tensor) -> Tensor:
    """A weight [out_features, in_features] in the native form: int32 [panels, words, 16], padded with zeros."""
    library = native.library()
    assert library is not None, "the native form is only picked where the library is"
    weight = weight.contiguous()
    features, depth = weight.shape
    # As panels_of and words_of in kernels/csrc/linear.h.
    panels, words = -(-features // 64) * 4, depth if weight.dtype == torch.float32 else -(-depth // 32) * 16
    packed = huge_pages.zeros((panels, words, 16), torch.int32)
    library.pack_weight(weight.data_ptr(), features, depth, packed.data_ptr(), native.TYPES[weight.dtype])
    return packed


def pack_quantised(weight: QuantisedWeight) -> tuple[Tensor, ...]:
    """Codes, scales, scales of rows and zero points in the panels of kernels/csrc/quantised.h, then the order of the
    columns. The last three are missing if the weight has none."""
    features, depth = weight.shape
    rows, code_bytes = -(-features // 64) * 64, -(-depth // 32) * 32 * weight.kind.bits // 8
    codes = F.pad(weight.codes, (0, code_bytes - weight.codes.shape[1], 0, rows - features))
    by_row = [part for part in (_scales_with_nan(weight), weight.row_scales, weight.zeros) if part is not None]
    parts = [codes.view(torch.int32), *(F.pad(part, (0, 0, 0, rows - features)) for part in by_row)]
    packed = []
    for part in parts:
        by_panel = part.view(rows // 16, 16, -1).transpose(1, 2)
        packed.append(huge_pages.zeros(tuple(by_panel.shape), part.dtype).copy_(by_panel))
    if weight.order is not None:
        packed.append(weight.order.int().contiguous())
    return tuple(packed)


def _scales_with_nan(weight: QuantisedWeight) -> Tensor:
    """The scales, NaN for groups with a NaN among their codes: the C kernels would read its codes 0x7F and 0xFF as 480
    and -480."""
    if weight.kind is not CodeKind.FP8:
        return weight.scales
    scales = weight.scales
    assert scales.dtype != torch.float8_e4m3fn, "the C kernels read no NaN from scales in e4m3"
    rows, columns = weight.shape
    step = max(1, _CHECKED_CODES // columns)
    for start in range(0, rows, step):
        found = ((weight.codes[start : start + step] & 127) == 127).nonzero()
        if len(found):
            scales = scales.clone() if scales is weight.scales else scales
            nan = E8M0_NAN if scales.dtype == torch.uint8 else torch.nan
            scales[start + found[:, 0], found[:, 1] // weight.group] = nan
    return scales


def weight_struct(
    weight: Tensor | QuantisedWeight, shape: tuple[int, int], parts: tuple[Tensor, ...], bias: Tensor | None
) -> bytes:
    """The C struct Weight, which points into `parts` and `bias`. `shape`: [out_features, in_features]."""
    first = (parts[0].data_ptr(), 0 if bias is None else bias.data_ptr(), *shape)
    if isinstance(weight, Tensor):
        return native.WEIGHT.pack(*first, 0, 0, 0, 0, 0, 0, 0, 0)
    pointers = iter(part.data_ptr() for part in parts[1:])
    scales = next(pointers)
    row_scales, zeros, order = (
        0 if part is None else next(pointers) for part in (weight.row_scales, weight.zeros, weight.order)
    )
    types = _SCALES[weight.scales.dtype], 0 if weight.zeros is None else native.ELEMENTS[weight.zeros.dtype]
    return native.WEIGHT.pack(*first, scales, row_scales, zeros, order, weight.kind, weight.group, *types)


# As in kernels/csrc/quantised.h.
_SCALES = {**native.TYPES, torch.float16: 2, torch.float8_e4m3fn: 3, torch.uint8: 6}


def scratch_size(rows: int, depth: int) -> int:
    """How many bytes the native form needs to repack x [rows, depth]."""
    return (rows + 15) * (depth + 31) * 4


_local = threading.local()


def scratch(size: int) -> int:
    """The address of at least `size` bytes for this thread's native calls. All calls of a thread share the buffer."""
    held: Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < size:
        held = _local.scratch = torch.empty(max(size, 1 << 20), dtype=torch.uint8)
    return held.data_ptr()
