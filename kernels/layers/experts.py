"""PackedExperts: the products of a mixture of experts.

    y[t, j] = down_e(act(gate_e(x[t])) * up_e(x[t])),  e = ids[t, j]
    out[t]  = sum over j of weights[t, j] * y[t, j]  +  sigmoid(shared_gate[t]) * shared[t]

act is `silu`, `gelu_tanh`, or gpt-oss' `clamped_swiglu`: (clamp(up) + 1) * g * sigmoid(alpha * g), with
g = min(gate, limit).

Shapes: x [tokens, hidden], contiguous; ids int32 and weights float32 [tokens, top_k]; gate_up [experts, 2 * I, hidden],
the gates first; down [experts, hidden, I]; shared [tokens, hidden] and shared_gate [tokens, 1], each may be None; out
like x. A rank may hold only some experts of the layer, with consecutive ids from `first` on. The others add nothing.

    native   CPU with the C library, bfloat16 or float32: kernels/csrc/expert_layers.c, each used expert is read once
    triton   GPU: kernels/layers/grouped_gemm.py
    plain    any other CPU: two `F.linear` for each used expert

QuantisedExperts stay quantised in the native and triton forms, if `holds_quantised` of linear.py says so; otherwise
they are dequantised. On a GPU both inputs, x and act(gate) * up, are quantised too, under the conditions of linear.py.

The sum is computed in float32, in the order of `ids`. In the native form, and in the triton form with
`batch_invariant`, a token's result does not depend on the other tokens.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coatcheck.kernels import huge_pages, native
from coatcheck.kernels.gpu_properties import TRITON_DEVICES, uses_triton
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_shape, once_per_geometry, refuse
from coatcheck.kernels.layers import grouped_gemm
from coatcheck.kernels.layers.linear import (
    choose_activations,
    holds_quantised,
    pack_quantised,
    scratch,
    weight_struct,
)
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_linear import Codes, pack_codes
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, RowFormat, quantise_rows
from coatcheck.kernels.layers.quantised_weight import QuantisedWeight
from coatcheck.kernels.layers.silu_mul import silu_mul_reference

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
_EXPERTS = struct.Struct("@5qffP")  # follows two structs Weight
_CALL = struct.Struct("@7Pq")


class PackedExperts(nn.Module):
    """The experts that a rank holds, for inference. Keeps no plain weight in the native form.

    `parts`: the tensors of gate_up and of down in their form; for QuantisedExperts those of pack_quantised.
    `activations`: how the inputs of gate_up and of down are quantised, as in PackedLinear. `padding_bytes`: how many
    bytes `parts` takes more than the weights themselves.
    """

    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        gate_up: Tensor | QuantisedExperts,
        down: Tensor | QuantisedExperts,
        *,
        top_k: int,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float = 0.0,
        first: int = 0,
        batch_invariant: bool = False,
        num_experts: int | None = None,
    ) -> None:
        """gate_up_bias [experts, 2 * I], down_bias [experts, hidden]. `alpha`, `limit`: parameters of clamped_swiglu.

        `num_experts`: the experts of the layer on all ranks; None: those of `gate_up`, and choices are not counted.
        Raises LaunchRefused.
        """
        super().__init__()
        _check_weights(gate_up, down, gate_up_bias, down_bias, activation)
        self.count, wide, self.hidden = gate_up.shape
        self.inner, self.all_experts = wide // 2, num_experts or self.count
        self.first, self.top_k, self.batch_invariant = first, top_k, batch_invariant
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.dtype, self.device = gate_up.dtype, gate_up.device
        self.form = pick_form(gate_up)
        self.activations = tuple(choose_activations(_stacked(weight)) for weight in (gate_up, down))
        gate_up, down = (
            hold_quantised(weight, weight.device) or weight.dequantise()
            if isinstance(weight, QuantisedExperts)
            else weight
            for weight in (gate_up, down)
        )
        for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
            self.register_buffer(name, None if bias is None else bias.detach().contiguous(), persistent=False)
        # How many tokens chose each expert, int64 [num_experts]. Only the native form counts.
        self.chosen = (
            None if num_experts is None or self.form != "native" else torch.zeros(num_experts, dtype=torch.int64)
        )
        # Plain attributes, not buffers, because a packed weight must not be moved, cast or saved as a weight.
        self.packed = b""
        if self.form == "triton":
            self.parts = self._hold_for_triton(gate_up, down)
        else:
            self.parts = (_pack(gate_up, self.form), _pack(down, self.form))
        held_bytes = sum(part.nbytes for parts in self.parts for part in parts)
        self.padding_bytes: int = held_bytes - gate_up.nbytes - down.nbytes
        if self.form == "native":
            self._pack_structs(gate_up, down)

    def _hold_for_triton(
        self, gate_up: Tensor | QuantisedExperts, down: Tensor | QuantisedExperts
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Set what Triton's kernels read. Returns `parts`."""
        formats = tuple(None if choice is None else choice.format for choice in self.activations)
        held = _codes_or_plain(gate_up, formats[0]), _codes_or_plain(down, formats[1])
        self._held = grouped_gemm.Weights(
            *held, self.gate_up_bias, self.down_bias, self.count, self.all_experts, self.inner, self.first,
            ACTIVATIONS.index(self.activation), self.alpha, self.limit,
        )  # fmt: skip
        first, second = (weight.parts if isinstance(weight, Codes) else (weight,) for weight in held)
        return first, second

    def _pack_structs(self, gate_up: Tensor | QuantisedExperts, down: Tensor | QuantisedExperts) -> None:
        """Set `packed`, the C structs Weight, Weight and Experts, and the functions of the C library."""
        library = native.library()
        assert library is not None, "the native form is only picked where the library is"
        biases = (self.gate_up_bias, self.down_bias)
        structs = (
            weight_struct(_stacked(weight), (weight.shape[1], weight.shape[2]), parts, bias)
            for weight, parts, bias in zip((gate_up, down), self.parts, biases, strict=True)
        )
        self.packed = b"".join(structs) + _EXPERTS.pack(
            self.first, self.count, self.top_k, ACTIVATIONS.index(self.activation), native.TYPES[self.dtype],
            self.alpha, self.limit, _pointer(self.chosen),
        )  # fmt: skip
        self._kernels, self._call = library.kernels, library.experts_product
        self._scratch_size = library.experts_scratch

    def forward(
        self,
        x: Tensor | QuantisedRows,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """out [tokens, hidden]. `x`: QuantisedRows if an earlier kernel has quantised x to `row_format`."""
        if isinstance(x, QuantisedRows):
            if x.format != self.row_format or x.dtype != self.dtype:
                refuse("x", f"{self.dtype} as {self.row_format}", f"{x.dtype} as {x.format}")
            rows, x_dtype = x.codes, x.codes.dtype
        else:
            rows, x_dtype = x, self.dtype
        _check(rows, x_dtype, ids, weights, shared, shared_gate, self.hidden, self.top_k, self.dtype, self.device)
        if isinstance(x, Tensor) and self.row_format is not None:
            x = quantise_rows(x, self.row_format)
        if self.form == "triton":
            return grouped_gemm.grouped_experts(
                self._held, x, ids, weights, shared, shared_gate, batch_invariant=self.batch_invariant
            )
        assert isinstance(x, Tensor), "only the triton form quantises x"
        if self.form == "native":
            out = torch.empty_like(x)
            tokens = x.shape[0]
            call = _CALL.pack(
                x.data_ptr(), ids.data_ptr(), weights.data_ptr(), _pointer(shared), _pointer(shared_gate),
                out.data_ptr(), scratch(self._scratch_size(self.packed, tokens)), tokens,
            )  # fmt: skip
            self._call(self._kernels, self.packed, call)
            return out
        out = self._sum_of_experts(x, ids, weights)
        if shared is not None:
            out += shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid()
        return out.to(x.dtype)

    @property
    def row_format(self) -> RowFormat | None:
        """How x is quantised before the products; None: x is not quantised."""
        choice = self.activations[0]
        return None if choice is None else choice.format

    @property
    def variant(self) -> object:
        """Equal for experts that share their kernels."""
        if self.form != "triton":
            return None
        w = self._held
        codes = (weight.variant if isinstance(weight, Codes) else None for weight in (w.gate_up, w.down))
        sizes = (self.count, self.all_experts, self.hidden, self.inner, self.top_k, self.activation)
        return *sizes, self.gate_up_bias is None, self.down_bias is None, *codes

    def compile_kernels(self, max_tokens: int) -> None:
        """Launch every kernel variant of the triton form that at most `max_tokens` can need once, so that none compiles
        later; nothing in other forms."""
        lengths = grouped_gemm.warm_up_lengths(self.top_k, self.all_experts) if self.form == "triton" else ()
        for tokens in (length for length in lengths if length <= max_tokens):
            x = torch.zeros((tokens, self.hidden), dtype=self.dtype, device=self.device)
            ids = torch.zeros((tokens, self.top_k), dtype=torch.int32, device=self.device)
            self(x, ids, torch.zeros_like(ids, dtype=torch.float32))

    def _sum_of_experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum in float32. The rows of each used expert are one product."""
        (gate_up,), (down,) = self.parts
        y = x.new_zeros((*ids.shape, self.hidden))
        for expert in ids.unique().tolist():
            local = expert - self.first
            if not 0 <= local < self.count:
                continue
            token, choice = torch.where(ids == expert)
            bias = None if self.gate_up_bias is None else self.gate_up_bias[local]
            wide = F.linear(x[token], gate_up[local], bias)
            bias = None if self.down_bias is None else self.down_bias[local]
            gated = activate(wide, self.activation, self.alpha, self.limit)
            y[token, choice] = F.linear(gated, down[local], bias)
        return (y.float() * weights.unsqueeze(-1)).sum(1)


def activate(gate_up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """[rows, 2 * I] -> [rows, I], computed in float32 and rounded once."""
    if activation != "clamped_swiglu":
        return silu_mul_reference(gate_up, activation)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return ((up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def pick_form(weight: Tensor | QuantisedExperts) -> str:
    """`native`, `triton` or `plain` (see the module's docstring), by the weight's device and dtype."""
    if isinstance(weight, QuantisedExperts):
        weight = weight.stacked.scales.new_empty(0, dtype=weight.dtype)
    if uses_triton(weight):
        return "triton"
    return "plain" if native.library_for(weight) is None else "native"


def hold_quantised(experts: QuantisedExperts, device: torch.device) -> QuantisedExperts | None:
    """The weights as PackedExperts holds them once they are on `device`: on a GPU without `row_scales`. None if it
    dequantises them. The loader calls this before it counts the weights' bytes."""
    is_on_gpu = device.type in TRITON_DEVICES
    if not (is_on_gpu or pick_form(experts) == "native") or not holds_quantised(experts.stacked, device):
        return None
    return replace(experts, stacked=experts.stacked.without_row_scales()) if is_on_gpu else experts


def _stacked(weight: Tensor | QuantisedExperts) -> Tensor | QuantisedWeight:
    return weight.stacked if isinstance(weight, QuantisedExperts) else weight


def _codes_or_plain(weight: Tensor | QuantisedExperts, format: RowFormat | None) -> Codes | Tensor:
    """The weight in the triton form. `format`: how the rows that it is multiplied with are quantised."""
    return pack_codes(weight.stacked, format) if isinstance(weight, QuantisedExperts) else weight.detach().contiguous()


def _pack(weight: Tensor | QuantisedExperts, form: str) -> tuple[Tensor, ...]:
    """The tensors of the weight in the native or plain form. For QuantisedExperts: those of pack_quantised."""
    if isinstance(weight, QuantisedExperts):
        return pack_quantised(weight.pad_rows(64).stacked)  # each expert has whole panels, as panels_of in linear.h
    if form != "native":
        return (weight.detach().contiguous(),)
    library = native.library_for(weight)
    assert library is not None, "the native form is only picked where the library is"
    count, features, depth = weight.shape
    # As panels_of and words_of in kernels/csrc/linear.h.
    panels, words = -(-features // 64) * 4, depth if weight.dtype == torch.float32 else -(-depth // 32) * 16
    packed = huge_pages.zeros((count, panels, words, 16), torch.int32)
    for plain, to in zip(weight.detach(), packed, strict=True):
        contiguous = plain.contiguous()
        library.pack_weight(contiguous.data_ptr(), features, depth, to.data_ptr(), native.TYPES[weight.dtype])
    return (packed,)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_weights(
    gate_up: Tensor | QuantisedExperts,
    down: Tensor | QuantisedExperts,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> None:
    if len(gate_up.shape) != 3 or gate_up.shape[1] % 2:
        refuse("gate_up", "shape [experts, 2 * I, hidden]", list(gate_up.shape))
    count, wide, hidden = gate_up.shape
    if tuple(down.shape) != (count, hidden, wide // 2):
        refuse("down", f"shape {[count, hidden, wide // 2]}", list(down.shape))
    if down.dtype != gate_up.dtype:
        refuse("down", f"dtype {gate_up.dtype}", down.dtype)
    for name, bias, width in (("gate_up_bias", gate_up_bias, wide), ("down_bias", down_bias, hidden)):
        if bias is not None:
            check_shape(name, bias, (count, width))
            check_dtype(name, bias, gate_up.dtype)
    if activation not in ACTIVATIONS:
        refuse("activation", " or ".join(ACTIVATIONS), activation)


@once_per_geometry
def _check(
    x: Tensor,
    x_dtype: torch.dtype,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    hidden: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check_dense("x", x, (None, hidden), x_dtype, device)
    check_dense("ids", ids, (x.shape[0], top_k), torch.int32, device)
    check_dense("weights", weights, (x.shape[0], top_k), torch.float32, device)
    if shared is not None:
        check_dense("shared", shared, tuple(x.shape), dtype, device)
    if shared_gate is not None:
        check_dense("shared_gate", shared_gate, (x.shape[0], 1), dtype, device)
