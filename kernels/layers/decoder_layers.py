"""Pre-norm decoder layers as calls into the C library: one sublayer (attention, MLP or experts), or consecutive layers.

    attention   out = output(attend(rotary(split(qkv(norm(x + residual))))))     keys and values stored on the way
    mlp         out = down(act(gate(h)) * up(h)),  h = norm(x + residual)
    experts     out = experts(h, *route(router(h))) + sigmoid(shared_gate(h)) * shared(h),  h as above

Each returns (out, x + residual). `out` is not added to the residual yet, because other ranks may have a part of it. The
C library calls the operations of the other files one after another, so the results have the same bits. This saves calls
from Python, which take a fifth of a small model's step of one token. All linears must have the native form. If
`is_native` is False, the caller runs the operations one by one.

Shapes: x, residual [tokens, hidden], contiguous; cos, sin [tokens, rot_dim]; cache, tables and slots as in kv_cache.py,
paged_attention.py and store_kv.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.paged_attention import check_tables
from coatcheck.kernels.gpu_properties import TRITON_DEVICES
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_shape, once_per_geometry, refuse
from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.linear import PackedLinear, scratch, scratch_size
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.route import Routing

_SCALE = struct.Struct("@Pff")
_MLP = struct.Struct("@qq")
_ATTEND = struct.Struct("@qqqqffq")
_STEP = struct.Struct("@PPqqPPqPPq")
_STREAM = struct.Struct("@5Pq")
_INT = struct.Struct("@q")
_POINTER = struct.Struct("@P")
_NO_NORM = _SCALE.pack(0, 0.0, 0.0)
_NO_LINEAR = bytes(native.WEIGHT.size)
_NO_MLP = _NO_NORM + 2 * _NO_LINEAR + _MLP.pack(0, 0)


def is_native(*linears: object, head_dim: int = 16) -> bool:
    """Whether a sublayer with these linears and experts can be one call into C."""
    native_form = all(isinstance(one, (PackedLinear, PackedExperts)) and one.form == "native" for one in linears)
    return "cpu" not in TRITON_DEVICES and native_form and head_dim % 16 == 0 and head_dim <= 256


class StepTables:
    """The arguments that all layers of a step with the same RoPE share. They are checked and packed once."""

    def __init__(
        self, cos: Tensor, sin: Tensor, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor
    ) -> None:
        _check_step(cos, sin, slot_mapping, block_tables, seq_lens, cu_seqlens)
        self.tokens = len(slot_mapping)
        self.rot_dim = cos.shape[1]
        self._held = (cos, sin, slot_mapping, block_tables, seq_lens, cu_seqlens)  # `packed` points into them
        self.packed = _STEP.pack(
            cos.data_ptr(), sin.data_ptr(), cos.shape[1], native.TYPES[cos.dtype], slot_mapping.data_ptr(),
            block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(), cu_seqlens.data_ptr(), len(seq_lens),
        )  # fmt: skip


class AttentionSublayer:
    """The operations from the norm to the output projection. Linears must pass `is_native`."""

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
        check_shape("norm", norm.weight, (qkv.weight_shape[1],))
        if qkv.weight_shape[0] != (heads + 2 * kv_heads) * head_dim or output.weight_shape[1] != heads * head_dim:
            refuse("qkv", f"{heads} + 2 * {kv_heads} heads of {head_dim}", list(qkv.weight_shape))
        if (q_norm is None) != (k_norm is None):
            refuse("q_norm", "a k_norm beside it, or neither", "one of them")
        self._held = (norm, qkv, output, q_norm, k_norm)  # `packed` points into them
        self.dtype, self.hidden, self._out = qkv.dtype, qkv.weight_shape[1], output.weight_shape[0]
        self._kv_heads, self.head_dim = kv_heads, head_dim
        self.packed = (
            _scale(norm) + _scale(q_norm) + _scale(k_norm) + qkv.packed + output.packed
            + _ATTEND.pack(heads, kv_heads, head_dim, sliding_window, scale, softcap, native.TYPES[self.dtype])
        )  # fmt: skip
        rows = self.hidden + qkv.weight_shape[0] + (3 * heads + kv_heads) * head_dim
        self._row_bytes = _row_bytes(rows, self.dtype, qkv, output)
        self._kernels, self._call = _library().kernels, _library().attention_sublayer

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepTables, cache: KVCache) -> tuple[Tensor, Tensor]:
        tokens = x.shape[0]
        _check_stream(x, residual, self.hidden, self.dtype)
        if tokens != step.tokens or step.rot_dim > self.head_dim:
            refuse("x", f"the step's {step.tokens} tokens, with rot_dim at most {self.head_dim}", list(x.shape))
        packed_cache = self.pack_cache(cache)
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty((tokens, self._out), dtype=self.dtype)
        stream = _stream(x, residual, total, out, self.scratch_size(tokens))
        if self._call(self._kernels, self.packed, packed_cache, step.packed, stream):
            raise native.out_of_memory("attention_sublayer")
        return out, total

    def scratch_size(self, tokens: int) -> int:
        """Bytes of working memory for a call."""
        return _scratch_size(tokens, self._row_bytes)

    def pack_cache(self, cache: KVCache) -> bytes:
        """One layer's cache as the C library reads it."""
        if cache.head_dim != self.head_dim or cache.kv_heads != self._kv_heads or cache.device.type != "cpu":
            refuse("k_cache", f"{self._kv_heads} heads of {self.head_dim}", f"{cache.kv_heads} of {cache.head_dim}")
        return cache.packed


class MlpSublayer:
    """The operations from the norm to the down projection. Linears must pass `is_native`."""

    def __init__(self, norm: RmsNorm, gate_up: PackedLinear, down: PackedLinear, activation: str) -> None:
        check_shape("norm", norm.weight, (gate_up.weight_shape[1],))
        if gate_up.weight_shape[0] != 2 * down.weight_shape[1]:
            refuse("gate_up", f"2 * {down.weight_shape[1]} features, as down reads", gate_up.weight_shape[0])
        self._held = (norm, gate_up, down)  # `packed` points into them
        self.dtype, self.hidden, self._out = gate_up.dtype, gate_up.weight_shape[1], down.weight_shape[0]
        self.packed = (
            _scale(norm) + gate_up.packed + down.packed
            + _MLP.pack(activation == "gelu_tanh", native.TYPES[self.dtype])
        )  # fmt: skip
        self._row_bytes = _row_bytes(self.hidden + 3 * down.weight_shape[1], self.dtype, gate_up, down)
        self._kernels, self._call = _library().kernels, _library().mlp_sublayer

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        _check_stream(x, residual, self.hidden, self.dtype)
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty((x.shape[0], self._out), dtype=self.dtype)
        self._call(self._kernels, self.packed, _stream(x, residual, total, out, self.scratch_size(x.shape[0])))
        return out, total

    def scratch_size(self, tokens: int) -> int:
        """Bytes of working memory for a call."""
        return _scratch_size(tokens, self._row_bytes)


class ExpertsSublayer:
    """The operations from the norm to the weighted sum of a mixture of experts. Linears and experts must pass
    `is_native`.

    `router`: in the experts' dtype, or in float32. `shared`: gate_up and down of the shared expert.
    """

    def __init__(
        self,
        norm: RmsNorm,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        shared: tuple[PackedLinear, PackedLinear] | None = None,
        shared_gate: PackedLinear | None = None,
    ) -> None:
        check_shape("norm", norm.weight, (experts.hidden,))
        if router.weight_shape != (routing.experts, experts.hidden):
            refuse("router", f"[{routing.experts}, {experts.hidden}]", list(router.weight_shape))
        if router.dtype not in (experts.dtype, torch.float32):
            refuse("router", f"dtype {experts.dtype} or {torch.float32}", router.dtype)
        if routing.top_k != experts.top_k:
            refuse("routing", f"the experts' top_k, {experts.top_k}", routing.top_k)
        if shared is not None and shared[0].weight_shape != (2 * shared[1].weight_shape[1], experts.hidden):
            refuse("shared", f"2 * {shared[1].weight_shape[1]} features, as down reads", shared[0].weight_shape[0])
        self._held = (norm, router, routing, experts, shared, shared_gate)  # `packed` points into them
        self.dtype, self.hidden = experts.dtype, experts.hidden
        self.packed = (
            _scale(norm) + router.packed + _INT.pack(native.TYPES[router.dtype]) + routing.pack() + experts.packed
            + (2 * _NO_LINEAR if shared is None else shared[0].packed + shared[1].packed)
            + (_NO_LINEAR if shared_gate is None else shared_gate.packed)
        )  # fmt: skip
        library = _library()
        self._kernels, self._call, self._size = library.kernels, library.sparse_sublayer, library.sparse_scratch

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        _check_stream(x, residual, self.hidden, self.dtype)
        total = x if residual is None else torch.empty_like(x)
        out = torch.empty_like(x)
        self._call(self._kernels, self.packed, _stream(x, residual, total, out, self.scratch_size(x.shape[0])))
        return out, total

    def scratch_size(self, tokens: int) -> int:
        """Bytes of working memory for a call."""
        return int(self._size(self.packed, tokens)) + 64


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer of FusedLayers.

    `after_attention`, `after_mlp`: norms of the outputs of the sublayers, in models that have them. `table_index`: the
    index of the layer's StepTables among those of the step.
    """

    attention: AttentionSublayer
    mlp: MlpSublayer | ExpertsSublayer
    after_attention: RmsNorm | None = None
    after_mlp: RmsNorm | None = None
    table_index: int = 0


class FusedLayers:
    """All layers of a model and its final norm in one call into C. Only for groups of one rank, because there is no
    all-reduce between them."""

    def __init__(self, layers: Sequence[FusedLayer], final_norm: RmsNorm) -> None:
        self._layers, self._final_norm = tuple(layers), final_norm  # `_packed` and `_packed_norm` point into them
        if final_norm.rounds_last:
            refuse("final_norm", "a norm without rounds_last", final_norm)
        widths = {(sublayer.hidden, sublayer.dtype) for layer in layers for sublayer in (layer.attention, layer.mlp)}
        if len(widths) != 1:
            refuse("layers", "one hidden size and dtype", widths)
        self._packed = b"".join(
            layer.attention.packed + _scale(layer.after_attention) + _mlp_or_experts(layer.mlp)
            + _scale(layer.after_mlp) + _INT.pack(layer.table_index)
            for layer in layers
        )  # fmt: skip
        self._packed_norm = _scale(final_norm)
        self._head_dim = min(layer.attention.head_dim for layer in layers)
        self._sized_for, self._size = -1, 0
        self._caches: Sequence[KVCache] = ()
        self._packed_caches = b""
        self._kernels, self._call = _library().kernels, _library().fused_layers

    def __call__(
        self, x: Tensor, count: int, steps: Sequence[StepTables], caches: Sequence[KVCache]
    ) -> tuple[Tensor, Tensor]:
        """Compute the first `count` layers. Returns (out, residual), whose sum is the hidden state. After all layers
        `out` is the final norm of that sum. `x` is overwritten: it is the residual.

        `caches`: the cache of each layer. The list is packed when it is first used, and must not change after that.
        """
        first = self._layers[0].attention
        _check_stream(x, None, first.hidden, first.dtype)
        for step in steps:
            if x.shape[0] != step.tokens or step.rot_dim > self._head_dim:
                refuse("x", f"the step's {step.tokens} tokens, with rot_dim at most {self._head_dim}", list(x.shape))
        if self._caches is not caches:
            pairs = zip(self._layers, caches, strict=True)
            self._packed_caches = b"".join(layer.attention.pack_cache(cache) for layer, cache in pairs)
            self._caches = caches
        out = torch.empty_like(x)
        tables = b"".join(step.packed for step in steps)
        norm = self._packed_norm if count == len(self._layers) else _NO_NORM
        stream = _stream(x, None, x, out, self._scratch_size(x.shape[0]))
        if self._call(self._kernels, self._packed, self._packed_caches, count, tables, norm, stream):
            raise native.out_of_memory("fused_layers")
        return out, x

    def _scratch_size(self, tokens: int) -> int:
        """Bytes of working memory for a call of `tokens` tokens, or for the largest call so far."""
        if tokens > self._sized_for:
            parts = [part for layer in self._layers for part in (layer.attention, layer.mlp)]
            self._sized_for, self._size = tokens, max(part.scratch_size(tokens) for part in parts)
        return self._size


def _mlp_or_experts(sublayer: MlpSublayer | ExpertsSublayer) -> bytes:
    if isinstance(sublayer, MlpSublayer):
        return sublayer.packed + _POINTER.pack(0)
    return _NO_MLP + _POINTER.pack(native.address_of(sublayer.packed))


def _stream(x: Tensor, residual: Tensor | None, total: Tensor, out: Tensor, size: int) -> bytes:
    return _STREAM.pack(
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), total.data_ptr(), out.data_ptr(), scratch(size),
        x.shape[0],
    )  # fmt: skip


def _scratch_size(tokens: int, row_bytes: int) -> int:
    # At most eight buffers, each rounded up to a cache line, and a misaligned start. Linears pad their input with rows.
    return (tokens + 15) * row_bytes + 9 * 64


def _row_bytes(elements: int, dtype: torch.dtype, *linears: PackedLinear) -> int:
    """Bytes of working memory for one token: its rows between the operations, and the larger repacked input of the
    linears."""
    return elements * dtype.itemsize + scratch_size(1, max(linear.weight_shape[1] for linear in linears)) // 16


def _scale(norm: RmsNorm | None) -> bytes:
    return _NO_NORM if norm is None else _SCALE.pack(norm.weight.data_ptr(), norm.eps, norm.offset)


@once_per_geometry
def _check_step(
    cos: Tensor, sin: Tensor, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens: Tensor
) -> None:
    cpu = torch.device("cpu")
    check_tables(block_tables, seq_lens, cu_seqlens, cpu)
    check_dense("slot_mapping", slot_mapping, (None,), torch.int64, cpu)
    check_dtype("cos", cos, *native.TYPES)
    check_dense("cos", cos, (len(slot_mapping), None), cos.dtype, cpu)
    check_dense("sin", sin, tuple(cos.shape), cos.dtype, cpu)


@once_per_geometry
def _check_stream(x: Tensor, residual: Tensor | None, hidden: int, dtype: torch.dtype) -> None:
    check_dense("x", x, (None, hidden), dtype, torch.device("cpu"))
    if residual is not None:
        check_dense("residual", residual, tuple(x.shape), dtype, x.device)


def _library() -> native.Library:
    library = native.library()
    assert library is not None, "a linear in the native form has its library"
    return library
