"""decode_weight(): a quantised weight as plain numbers.

    weight = (codes - zeros) × scales

with one scale, and one zero point if there are any, for each block of rows and columns. Computed in float32 and rounded
once to the wanted dtype. The layouts are those of the projects that write them: compressed-tensors, AutoAWQ (gemm),
AutoGPTQ, DeepSeek-V3 (FP8 in blocks), the OCP Microscaling specification 1.0 (MXFP4) and bitsandbytes (NF4).
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from coatcheck.workers.checkpoint.stored_weight import Encoding, StoredWeight

Parts = Mapping[str, Tensor]

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the place of each nibble among its neighbours, from the lowest
# The 16 values of E2M1: sign, two bits of exponent, one of mantissa.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS: Final = 127
_NESTED_BLOCK: Final = 256  # scales that share a scale of their own


def decode_weight(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    """`parts`: the stored tensors by role, whole or sliced as `StoredWeight.slice_parts` says. Returns the weight, or
    that slice of it, in `dtype`."""
    return _DECODERS[weight.encoding](weight, parts, dtype)


def unpack_bits(packed: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Splits each int32 along `dim` into 32 / bits unsigned integers, the lowest bits first. `order`: the place of each
    of them among its neighbours. Returns int32."""
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (packed.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        fields = fields[..., torch.tensor(order).argsort()]
    return fields.reshape(*fields.shape[:-2], fields.shape[-2] * count).movedim(-1, dim)


def _scale(weight: StoredWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None) -> Tensor:
    """codes float32 [rows, columns], scales and zeros [row blocks, column blocks], or one number for all."""
    rows, columns = codes.shape
    scales = _spread(scales.float(), rows, columns, weight.block, order)
    if zeros is not None:
        codes = codes - _spread(zeros.float(), rows, columns, weight.block, order)
    return codes * scales


def _spread(values: Tensor, rows: int, columns: int, block: tuple[int, int], order: Tensor | None) -> Tensor:
    if values.dim() < 2:
        values = values.reshape(-1, 1)  # one for each row, or one for all
    if values.shape[1] > 1:
        if order is not None:
            values = values[:, order.long()]
        else:
            values = values.repeat_interleave(block[1], dim=1)[:, :columns]
    if values.shape[0] > 1:
        values = values.repeat_interleave(block[0], dim=0)[:rows]
    return values


def _decode_packed(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    middle = 1 << (weight.bits - 1)  # codes and zero points are stored with this added
    codes = unpack_bits(parts["codes"], weight.bits, 1) - middle
    zeros = None
    if "zeros" in parts:
        zeros = unpack_bits(parts["zeros"], weight.bits, 0) - middle
    order = parts.get("order")
    columns = weight.shape[1] if order is None else order.numel()
    return _scale(weight, codes[:, :columns].float(), parts["scales"], zeros, order).to(dtype)


def _decode_plain(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    return _scale(weight, parts["codes"].float(), parts["scales"], parts.get("zeros"), None).to(dtype)


def _decode_awq(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    codes = unpack_bits(parts["codes"], weight.bits, 1, _AWQ_ORDER).T
    zeros = unpack_bits(parts["zeros"], weight.bits, 1, _AWQ_ORDER).T
    return _scale(weight, codes.float(), parts["scales"].T, zeros, None).to(dtype)


def _decode_gptq(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    codes = unpack_bits(parts["codes"], weight.bits, 0).T
    # The gptq layout stores a zero point minus 1, modulo 2^bits: 0 is stored as all ones. gptq_v2 stores it as it is.
    zeros = (unpack_bits(parts["zeros"], weight.bits, 1).T + weight.zero_offset) & ((1 << weight.bits) - 1)
    return _scale(weight, codes.float(), parts["scales"].T, zeros, parts.get("order")).to(dtype)


def _decode_mxfp4(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    """codes uint8 [experts, rows, blocks, 16], two columns in a byte, the lower half first; scales uint8 [experts,
    rows, blocks]. Returns [experts, columns, rows], as transformers holds experts."""
    table = torch.tensor(_E2M1, dtype=dtype)
    whole = torch.empty(weight.shape, dtype=dtype)
    for expert, (codes, scales) in enumerate(zip(parts["codes"], parts["scales"], strict=True)):
        values = table[torch.stack((codes & 15, codes >> 4), dim=-1).long()].flatten(-2)
        exponents = (scales.int() - _E8M0_BIAS).unsqueeze(-1)
        whole[expert] = torch.ldexp(values, exponents).flatten(-2).T
    return whole


def _decode_nf4(weight: StoredWeight, parts: Parts, dtype: torch.dtype) -> Tensor:
    """codes uint8, two elements in a byte, the upper half first; one scale for a block of the flattened weight. Scales
    may be quantised themselves."""
    block, offset = weight.constants
    codes = parts["codes"].flatten()
    values = parts["table"].float()[torch.stack((codes >> 4, codes & 15), dim=-1).long()].flatten()
    scales = parts["scales"]
    if "scale_table" in parts:
        outer = parts["scale_scales"].float().repeat_interleave(_NESTED_BLOCK)[: scales.numel()]
        scales = parts["scale_table"].float()[scales.long()] * outer + offset
    rows, columns = weight.shape
    values = values[: rows * columns]
    spread = scales.float().repeat_interleave(int(block))[: values.numel()]
    return (values * spread).reshape(rows, columns).to(dtype)


_DECODERS: Final[Mapping[Encoding, Callable[[StoredWeight, Parts, torch.dtype], Tensor]]] = {
    Encoding.PACKED_INT: _decode_packed,
    Encoding.INT8: _decode_plain,
    Encoding.FLOAT8: _decode_plain,
    Encoding.AWQ: _decode_awq,
    Encoding.GPTQ: _decode_gptq,
    Encoding.MXFP4: _decode_mxfp4,
    Encoding.NF4: _decode_nf4,
}
