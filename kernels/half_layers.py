"""A half of a pre-norm decoder layer, attention or MLP, as one call into the C library.

    attention   out = output(attend(rotary(split(qkv(norm(x + residual))))))     keys and values stored on the way
    mlp         out = down(act(gate(h)) * up(h)),  h = norm(x + residual)

Each returns (out, x + residual); `out` is not added yet, since other ranks may have a part of it. The C side calls the
operations of the other files one after the other, so the results are the same bits as theirs; what is saved is the way
through Python, half of a small model's step at one token. Only where every linear is in the native form and the pool
has the model's own dtype: elsewhere `half_layers_serve` is false, and the caller takes the operations one by one.

Shapes: x, residual [tokens, hidden], dense; cos, sin [tokens, rot_dim]; caches, tables and slots as in
paged_attention.py and store_kv.py. The file does not know which layer it is, nor what follows.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from . import native
from .launch_check import Passed, refuse, want_contiguous, want_device, want_dtype, want_shape
from .linear import PackedLinear, scratch
from .paged_attention import check_tables, checked_caches
from .rms_norm import RmsNorm

_SCALE = struct.Struct("@Pff")
_LINEAR = struct.Struct("@PPqq")
_MLP = struct.Struct("@qq")
_ATTEND = struct.Struct("@qqqqffq")
_CACHE = struct.Struct("@PPqqq")
_STEP = struct.Struct("@PPqqPPqPPq")
_STREAM = struct.Struct("@5Pq")
_NO_NORM = _SCALE.pack(0, 0.0, 0.0)

_passed = Passed()


def half_layers_serve(*linears: object, head_dim: int = 16) -> bool:
    """Whether a half made of these linears can be one native call."""
    native_form = all(isinstance(linear, PackedLinear) and linear.form == "native" for linear in linears)
    return native_form and head_dim % 16 == 0 and head_dim <= 256


class StepTables:
    """What is the same for all layers of one step that turn alike: checked and packed once."""

    def __init__(
        self, cos: Tensor, sin: Tensor, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor
    ) -> None:
        tokens, cpu = len(slot_mapping), torch.device("cpu")
        check_tables(block_tables, seq_lens, cu_seqlens, cpu)
        want_dtype("slot_mapping", slot_mapping, torch.int64)
        want_shape("cos", cos, (tokens, None))
        want_shape("sin", sin, tuple(cos.shape))
        want_dtype("cos", cos, *native.TYPES)
        want_dtype("sin", sin, cos.dtype)
        for name, tensor in (("slot_mapping", slot_mapping), ("cos", cos), ("sin", sin)):
            want_contiguous(name, tensor)
            want_device(name, tensor, cpu)
        self.tokens = tokens
        self.rot_dim = cos.shape[1]
        self._held = (cos, sin, slot_mapping, block_tables, seq_lens, cu_seqlens)  # `packed` points into them
        self.packed = _STEP.pack(
            cos.data_ptr(), sin.data_ptr(), cos.shape[1], native.TYPES[cos.dtype], slot_mapping.data_ptr(),
            block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(), cu_seqlens.data_ptr(), len(seq_lens),
        )  # fmt: skip


class AttentionHalf:
    """From the residual stream to the output projection. Linears must pass `half_layers_serve`."""

    def __init__(
        self,
        norm: RmsNorm,
        qkv: PackedLinear,
        output: PackedLinear,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        want_shape("norm", norm.weight, (qkv.weight_shape[1],))
        if qkv.weight_shape[0] != (heads + 2 * kv_heads) * head_dim or output.weight_shape[1] != heads * head_dim:
            refuse("qkv", f"{heads} + 2 * {kv_heads} heads of {head_dim}", list(qkv.weight_shape))
        if (q_norm is None) != (k_norm is None):
            refuse("q_norm", "a k_norm beside it, or neither", "one of them")
        self._held = (norm, qkv, output, q_norm, k_norm)  # `_packed` points into them
        self._dtype, self._hidden, self._out = qkv.dtype, qkv.weight_shape[1], output.weight_shape[0]
        self._heads, self._head_dim = heads, head_dim
        self._packed = (
            _scale(norm) + _scale(q_norm) + _scale(k_norm) + _linear(qkv) + _linear(output)
            + _ATTEND.pack(heads, kv_heads, head_dim, sliding_window, scale, softcap, native.TYPES[self._dtype])
        )  # fmt: skip
        rows = self._hidden + qkv.weight_shape[0] + (3 * heads + kv_heads) * head_dim
        self._row_bytes = _row_bytes(rows, self._dtype, qkv, output)
        self._call = _library().attention_half

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepTables, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens = x.shape[0]
        if _passed.is_new(x, residual, k_cache):
            _check_stream(x, residual, self._hidden, self._dtype)
            _passed.add(x, residual, k_cache)
        if tokens != step.tokens or step.rot_dim > self._head_dim:
            refuse("x", f"the step's {step.tokens} tokens, turned by at most {self._head_dim}", list(x.shape))
        caches = checked_caches(k_cache, v_cache)
        if caches.dtype != self._dtype or caches.head_dim != self._head_dim or caches.device.type != "cpu":
            refuse("k_cache", f"{self._dtype} heads of {self._head_dim}", f"{caches.dtype} of {caches.head_dim}")
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty((tokens, self._out), dtype=self._dtype)
        cache = _CACHE.pack(k_cache.data_ptr(), v_cache.data_ptr(), caches.k_stride, caches.v_stride, caches.block_size)
        if self._call(self._packed, cache, step.packed, _stream(x, residual, total, out, self._row_bytes)):
            raise native.out_of_memory("attention_half")
        return out, total


class MlpHalf:
    """From the residual stream to the down projection. Linears must pass `half_layers_serve`."""

    def __init__(self, norm: RmsNorm, gate_up: PackedLinear, down: PackedLinear, activation: str) -> None:
        want_shape("norm", norm.weight, (gate_up.weight_shape[1],))
        if gate_up.weight_shape[0] != 2 * down.weight_shape[1]:
            refuse("gate_up", f"2 * {down.weight_shape[1]} features, as down reads", gate_up.weight_shape[0])
        self._held = (norm, gate_up, down)  # `_packed` points into them
        self._dtype, self._hidden, self._out = gate_up.dtype, gate_up.weight_shape[1], down.weight_shape[0]
        self._packed = (
            _scale(norm) + _linear(gate_up) + _linear(down)
            + _MLP.pack(activation == "gelu_tanh", native.TYPES[self._dtype])
        )  # fmt: skip
        self._row_bytes = _row_bytes(self._hidden + 3 * down.weight_shape[1], self._dtype, gate_up, down)
        self._call = _library().mlp_half

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if _passed.is_new(x, residual):
            _check_stream(x, residual, self._hidden, self._dtype)
            _passed.add(x, residual)
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty((x.shape[0], self._out), dtype=self._dtype)
        self._call(self._packed, _stream(x, residual, total, out, self._row_bytes))
        return out, total


def _stream(x: Tensor, residual: Tensor | None, total: Tensor, out: Tensor, row_bytes: int) -> bytes:
    tokens = x.shape[0]
    # Eight stretches at most, each rounded up to a cache line, and a misaligned start.
    room = scratch(tokens * row_bytes + 9 * 64)
    return _STREAM.pack(
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), total.data_ptr(), out.data_ptr(), room, tokens
    )


def _row_bytes(elements: int, dtype: torch.dtype, *linears: PackedLinear) -> int:
    """Scratch for one token: its rows between the operations, and the larger of the linears' repacked inputs."""
    return elements * dtype.itemsize + max(linear.weight_shape[1] + 1 for linear in linears) * 4


def _scale(norm: RmsNorm | None) -> bytes:
    return _NO_NORM if norm is None else _SCALE.pack(norm.weight.data_ptr(), norm.eps, norm.offset)


def _linear(linear: PackedLinear) -> bytes:
    return _LINEAR.pack(*linear.pointers, *linear.weight_shape)


def _check_stream(x: Tensor, residual: Tensor | None, hidden: int, dtype: torch.dtype) -> None:
    want_shape("x", x, (None, hidden))
    want_dtype("x", x, dtype)
    want_contiguous("x", x)
    want_device("x", x, torch.device("cpu"))
    if residual is not None:
        want_shape("residual", residual, tuple(x.shape))
        want_dtype("residual", residual, dtype)
        want_contiguous("residual", residual)
        want_device("residual", residual, x.device)


def _library() -> native.Library:
    library = native.library()
    assert library is not None, "a linear in the native form has its library"
    return library
