"""Turns the stored tensors of a quantised weight into a QuantisedWeight or QuantisedExperts, or into a plain tensor.

    weight = (codes - zeros) × scales

with one scale, and one zero point if the method has them, for each block of rows and columns. NF4 is only dequantised:
it is computed in float32 and rounded once to the wanted dtype. The layouts are those of the projects that write them:
compressed-tensors, AutoAWQ (gemm), AutoGPTQ, DeepSeek-V3 (FP8 in blocks), the OCP Microscaling specification 1.0
(MXFP4), NVIDIA's ModelOpt (NVFP4) and bitsandbytes (NF4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from coatcheck.workers.checkpoint.stored_weight import Encoding, StoredWeight

Parts = Mapping[str, Tensor]

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the element in each 4-bit field of an int32, lowest field first
_MXFP4_BLOCK: Final = 32  # columns that share a scale
_NESTED_BLOCK: Final = 256  # NF4's scales that share a scale, if the scales are quantised themselves


def decode_weight(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    """The dequantised weight, or a slice of it, in `dtype`. `parts`: the stored tensors by role, whole or sliced as
    `StoredWeight.slice_parts` says."""
    if weight.encoding is Encoding.NF4:
        return _decode_nf4(weight, parts, dtype)
    if weight.encoding is Encoding.MXFP4:
        return _read_mxfp4(parts, dtype).dequantise().transpose(1, 2)
    return _READERS[weight.encoding](weight, parts, dtype).dequantise()


def read_codes(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight | QuantisedExperts | None:
    """As `decode_weight`, without dequantising. `dtype`: in which the linear computes. None for NF4."""
    if weight.encoding is Encoding.MXFP4:
        return _read_mxfp4(parts, dtype)
    read = _READERS.get(weight.encoding)
    return None if read is None else read(weight, parts, dtype)


def unpack_bits(packed: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Split each int32 along `dim` into 32 / bits unsigned integers, the lowest bits first. `order`: for each of these
    fields, the index of its element among the elements of the int32. Returns int32."""
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (packed.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        fields = fields[..., torch.tensor(order).argsort()]
    return fields.reshape(*fields.shape[:-2], fields.shape[-2] * count).movedim(-1, dim)


def _quantised(
    weight: StoredWeight,
    kind: CodeKind,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    members: Tensor | None,
    dtype: torch.dtype,
) -> QuantisedWeight:
    """`codes`: [rows, columns]. `scales`, `zeros`: [row blocks, column blocks], [rows], or one number for all.
    `members`: the group of each column, int [columns]; None: the columns of a group are contiguous."""
    rows, columns = codes.shape
    scales = _by_row(scales, rows, weight.block[0])
    zeros = None if zeros is None else _by_row(zeros, rows, weight.block[0])
    group = columns if scales.shape[1] == 1 else weight.block[1]
    order = None
    if members is not None and scales.shape[1] > 1:
        by_group = members.long().argsort(stable=True)
        members = members.long()[by_group]
        # A rank's slice may have only some columns of a group. The group size is then one that divides all of them.
        group = math.gcd(*torch.unique_consecutive(members, return_counts=True)[1].tolist())
        scales = scales[:, members[::group]]
        zeros = None if zeros is None else zeros[:, members[::group]]
        if not torch.equal(by_group, torch.arange(columns)):
            codes, order = codes[:, by_group], by_group.int()
    return QuantisedWeight.of_codes(kind, codes, scales, group, dtype, zeros, order)


def _by_row(values: Tensor, rows: int, height: int) -> Tensor:
    """[row blocks, column blocks] -> [rows, column blocks]."""
    if values.dim() < 2:
        values = values.reshape(-1, 1)  # one number for each row, or one for all rows
    return values.expand(rows, -1) if values.shape[0] == 1 else values.repeat_interleave(height, dim=0)[:rows]


def _read_packed(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight:
    middle = 1 << (weight.bits - 1)  # codes and zero points are stored with this added
    codes = unpack_bits(parts["codes"], weight.bits, 1) - middle
    zeros = None
    if "zeros" in parts:
        zeros = parts["zeros"]
        if not zeros.is_floating_point():  # those of GGUF are fractions, and are not packed
            zeros = unpack_bits(zeros, weight.bits, 0) - middle
    members = parts.get("order")
    columns = weight.shape[1] if members is None else members.numel()
    return _quantised(weight, _integers(weight), codes[:, :columns], parts["scales"], zeros, members, dtype)


def _read_plain(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight:
    kind = CodeKind.INT8 if weight.encoding is Encoding.INT8 else CodeKind.FP8
    quantised = _quantised(weight, kind, parts["codes"], parts["scales"], parts.get("zeros"), None, dtype)
    return replace(quantised, quantises_activations=weight.quantises_activations)


def _read_awq(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight:
    middle = 1 << (weight.bits - 1)
    codes = unpack_bits(parts["codes"], weight.bits, 1, _AWQ_ORDER).T - middle
    zeros = unpack_bits(parts["zeros"], weight.bits, 1, _AWQ_ORDER).T - middle
    return _quantised(weight, CodeKind.INT4, codes, parts["scales"].T, zeros, None, dtype)


def _read_gptq(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight:
    middle = 1 << (weight.bits - 1)
    codes = unpack_bits(parts["codes"], weight.bits, 0).T - middle
    # The gptq layout stores a zero point minus 1, modulo 2^bits: 0 is stored as all ones. gptq_v2 stores it unchanged.
    zeros = (unpack_bits(parts["zeros"], weight.bits, 1).T + weight.zero_offset) & ((1 << weight.bits) - 1)
    zeros = zeros - middle
    return _quantised(weight, _integers(weight), codes, parts["scales"].T, zeros, parts.get("order"), dtype)


def _integers(weight: StoredWeight) -> CodeKind:
    return CodeKind.INT8 if weight.bits == 8 else CodeKind.INT4  # 2-bit codes are held in 4 bits


def _read_float4(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> QuantisedWeight:
    """codes: uint8 [rows, columns / 2], the left of two columns in the lower half. scales [rows, groups]: uint8, as a
    QuantisedWeight has them, or e4m3. These are multiplied with `scale_factor` or divided by `scale_divisor`, one
    number for the whole weight."""
    codes, scales, row_scales = parts["codes"], parts["scales"], None
    if scales.dtype != torch.uint8:
        factor = parts["scale_factor"] if "scale_factor" in parts else 1 / parts["scale_divisor"]
        row_scales = factor.reshape(1, 1).repeat(codes.shape[0], 1)
    shape = (codes.shape[0], 2 * codes.shape[1])
    return QuantisedWeight(
        CodeKind.FP4, shape, codes.contiguous(), scales.contiguous(), weight.block[1], dtype, row_scales=row_scales
    )


def _read_mxfp4(parts: Parts, dtype: torch.dtype) -> QuantisedExperts:
    """codes: uint8 [experts, rows, blocks, 16], two columns in a byte, the lower half first. scales: uint8 [experts,
    rows, blocks], exponents of two (E8M0)."""
    experts, rows, blocks = parts["scales"].shape
    codes, scales = parts["codes"].reshape(experts * rows, -1), parts["scales"].reshape(experts * rows, blocks)
    shape = (experts * rows, blocks * _MXFP4_BLOCK)
    return QuantisedExperts(experts, QuantisedWeight(CodeKind.FP4, shape, codes, scales, _MXFP4_BLOCK, dtype))


def _decode_nf4(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    """codes: uint8, two elements in a byte, the upper half first. scales: one for each block of the flattened weight;
    they may be quantised themselves."""
    block, offset = weight.constants
    codes = parts["codes"].flatten()
    values = parts["table"].float()[torch.stack((codes >> 4, codes & 15), dim=-1).long()].flatten()
    scales = parts["scales"]
    if "scale_table" in parts:
        outer = parts["scale_scales"].float().repeat_interleave(_NESTED_BLOCK)[: scales.numel()]
        scales = parts["scale_table"].float()[scales.long()] * outer + offset
    rows, columns = weight.shape
    values = values[: rows * columns]
    scale_of_each = scales.float().repeat_interleave(int(block))[: values.numel()]
    return (values * scale_of_each).reshape(rows, columns).to(dtype)


_READERS: Final[Mapping[Encoding, Callable[[StoredWeight, Parts, torch.dtype], QuantisedWeight]]] = {
    Encoding.PACKED_INT: _read_packed,
    Encoding.INT8: _read_plain,
    Encoding.FLOAT8: _read_plain,
    Encoding.AWQ: _read_awq,
    Encoding.GPTQ: _read_gptq,
    Encoding.FLOAT4: _read_float4,
}
