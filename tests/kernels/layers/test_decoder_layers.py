"""Halves of a decoder layer as one native call, against their separate operations."""

from __future__ import annotations

from itertools import accumulate
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.attention.rotary import rotary_and_store
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.store_kv import store_kv_reference
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.decoder_layers import AttentionSublayer, FusedLayer, FusedLayers, MlpSublayer, StepTables
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul
from tests.examples import pairwise
from tests.kernels.caches import pool_of, strided_cache
from tests.kernels.cpu_classes import each_class
from tests.kernels.layers.quantised_weights import random_weight

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("linear_bf16")]

HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 96, 6, 2, 32, 16


def linear(
    features: int, depth: int, dtype: torch.dtype, bias: bool = False, kind: CodeKind | None = None
) -> PackedLinear:
    if kind is not None:
        return PackedLinear(random_weight(kind, features, depth, 8, dtype))
    weight = (torch.randn(features, depth) / depth**0.5).to(dtype)
    return PackedLinear(weight, torch.randn(features).to(dtype) if bias else None)


def norm(width: int, dtype: torch.dtype, offset: float = 0.0) -> RmsNorm:
    return RmsNorm((torch.randn(width) + 1 - offset).to(dtype), 1e-6, offset)


class Batch:
    """Sequences of (context, new tokens) over a pool with unrelated blocks between theirs."""

    def __init__(self, sequences: list[tuple[int, int]], dtype: torch.dtype, kv: torch.dtype | None = None) -> None:
        longest = max(context + new for context, new in sequences)
        width = -(-longest // BLOCK)
        order = torch.randperm(width * len(sequences)).to(torch.int32)
        self.tables = order.view(len(sequences), width)
        rows, everywhere = torch.randn(2, len(order) * BLOCK, KV_HEADS, DIM).to(dtype), torch.arange(len(order) * BLOCK)
        self.cache, self.copy = (strided_cache(len(order), KV_HEADS, BLOCK, DIM, kv or dtype) for _ in range(2))
        for cache in (self.cache, self.copy):
            store_kv_reference(rows[0], rows[1], cache, everywhere)
        self.seq_lens = torch.tensor([context + new for context, new in sequences], dtype=torch.int32)
        self.cu = torch.tensor(list(accumulate((new for _, new in sequences), initial=0)), dtype=torch.int32)
        self.longest = max(new for _, new in sequences)
        slots, positions = [], []
        for row, (context, new) in enumerate(sequences):
            for at in range(context, context + new):
                positions.append(at)
                slots.append(int(self.tables[row, at // BLOCK]) * BLOCK + at % BLOCK)
        self.slots = torch.tensor(slots)
        angles = torch.tensor(positions)[:, None] * torch.logspace(0, -3, DIM // 2).repeat(2)[None]
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def step(self) -> StepTables:
        return StepTables(self.cos, self.sin, self.slots, self.tables, self.seq_lens, self.cu)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, scale: float, cap: float) -> Tensor:
        q = rotary_and_store(q, k, v, self.cos, self.sin, cache, self.slots)
        return paged_attention(
            q, cache, block_tables=self.tables, seq_lens=self.seq_lens, cu_seqlens_q=self.cu,
            scale=scale, sliding_window=24, softcap=cap,
        )  # fmt: skip


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("offset", [0.0, 1.0]),
    ("head_norms", [False, True]),
    ("sequences", [[(40, 1)], [(0, 1), (63, 1), (7, 1)], [(16, 37), (5, 1), (0, 64)]]),
    ("first", [False, True]),
    ("kv", [None, torch.float8_e4m3fn, torch.uint8]),
)
def test_an_attention_sublayer_is_its_operations_in_a_row(
    dtype: torch.dtype,
    offset: float,
    head_norms: bool,
    sequences: list[tuple[int, int]],
    first: bool,
    kv: torch.dtype | None,
) -> None:
    """The output, the new residual and the cache have the same bits as after the separate operations."""
    torch.manual_seed(len(sequences))
    batch = Batch(sequences, dtype, kv)
    tokens = len(batch.slots)
    qkv = linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, dtype, bias=offset == 0.0)
    output, before = linear(80, HEADS * DIM, dtype), norm(HIDDEN, dtype, offset)
    q_norm, k_norm = (norm(DIM, dtype, offset), norm(DIM, dtype, offset)) if head_norms else (None, None)
    x, residual = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))

    sublayer = AttentionSublayer(
        before, qkv, output, HEADS, KV_HEADS, DIM, scale=0.2, q_norm=q_norm, k_norm=k_norm, sliding_window=24, softcap=9
    )
    out, total = sublayer(x, None if first else residual, batch.step(), batch.cache)

    h, want_total = (before(x), x) if first else before.add_and_norm(x, residual)
    q, k, v = qkv(h).view(tokens, -1, DIM).split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = q_norm(q), k_norm(k)
    want = output(batch.attend(q, k, v, batch.copy, 0.2, 9.0).flatten(1))
    assert torch.equal(out, want) and torch.equal(total, want_total)
    assert torch.equal(pool_of(batch.cache), pool_of(batch.copy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
def test_an_mlp_sublayer_is_its_operations_in_a_row(dtype: torch.dtype, activation: str, tokens: int) -> None:
    """The output and the new residual have the same bits as after the separate operations, whether or not the inner
    features fill whole tiles."""
    torch.manual_seed(tokens)
    x, residual = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))
    before = norm(HIDDEN, dtype)
    for inner, kind in ((200, None), (160, None), (160, CodeKind.INT8)):
        gate_up, down = linear(2 * inner, HIDDEN, dtype, True, kind), linear(HIDDEN, inner, dtype, kind=kind)
        out, total = MlpSublayer(before, gate_up, down, activation)(x, residual)
        h, want_total = before.add_and_norm(x, residual)
        assert torch.equal(out, down(silu_mul(gate_up(h), activation))) and torch.equal(total, want_total)


def test_an_mlp_sublayer_of_many_rows_is_its_operations_in_a_row() -> None:
    """The bits are those of the separate operations also where the rows fill several blocks of tiles."""
    gate_up, down = linear(128, 2100, torch.bfloat16), linear(100, 64, torch.bfloat16)
    before = norm(2100, torch.bfloat16)
    x = torch.randn(1000, 2100).bfloat16()
    out, _ = MlpSublayer(before, gate_up, down, "silu")(x, None)
    assert torch.equal(out, down(silu_mul(gate_up(before(x)), "silu")))


def test_wrong_arguments_are_refused_by_name() -> None:
    """A wrong shape, dtype or stride of any tensor is refused before anything is computed.

    `narrow` was accepted before by a sublayer with its hidden size, 64.
    """
    batch = Batch([(4, 1), (9, 1)], torch.float32)
    qkv, output = linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, torch.float32), linear(96, HEADS * DIM, torch.float32)
    before, q_norm = norm(HIDDEN, torch.float32), norm(DIM, torch.float32)
    sublayer = AttentionSublayer(before, qkv, output, HEADS, KV_HEADS, DIM, scale=1.0)
    x, step, cache = torch.randn(2, HIDDEN), batch.step(), batch.cache
    narrow = torch.randn(2, 64)
    MlpSublayer(norm(64, torch.float32), linear(96, 64, torch.float32), linear(64, 48, torch.float32), "silu")(
        narrow, None
    )
    refused = [
        ("x", lambda: sublayer(narrow, None, step, cache)),
        ("x", lambda: sublayer(x[:, :90], None, step, cache)),
        ("x", lambda: sublayer(x.bfloat16(), None, step, cache)),
        ("x", lambda: sublayer(torch.randn(HIDDEN, 2).T, None, step, cache)),
        ("x", lambda: sublayer(torch.randn(3, HIDDEN), None, step, cache)),
        ("residual", lambda: sublayer(x, x[:1], step, cache)),
        ("k_cache", lambda: sublayer(x, None, step, strided_cache(4, KV_HEADS + 1, BLOCK, DIM, torch.int8))),
        ("k_cache", lambda: sublayer(x, None, step, strided_cache(4, KV_HEADS, BLOCK, DIM + 2, torch.float32))),
        ("cos", lambda: StepTables(batch.cos[:1], batch.sin, batch.slots, batch.tables, batch.seq_lens, batch.cu)),
        ("slot_mapping", lambda: StepTables(
            batch.cos, batch.sin, batch.slots.int(), batch.tables, batch.seq_lens, batch.cu)),
        ("gate_up", lambda: MlpSublayer(before, qkv, output, "silu")),
        ("qkv", lambda: AttentionSublayer(before, qkv, output, HEADS, 1, DIM, scale=1.0)),
        ("q_norm", lambda: AttentionSublayer(
            before, qkv, output, HEADS, KV_HEADS, DIM, scale=1.0, q_norm=q_norm)),
    ]  # fmt: skip
    kept = pool_of(cache).clone()
    for name, call in refused:
        with pytest.raises(LaunchRefused, match=f"^{name}: expected"):
            call()
    assert torch.equal(pool_of(cache), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_fused_layers_are_their_layers_in_a_row(dtype: torch.dtype, sandwich: bool, count: int) -> None:
    """The first `count` of FusedLayers, with two kinds of rotary tables, give the bits of their sublayers in turn. The
    final norm follows the last layer."""
    torch.manual_seed(count)
    batches = [Batch([(40, 1), (0, 21), (17, 1)], dtype) for _ in range(3)]
    for batch in batches[1:]:  # one step: layers differ only in their caches and rotary tables
        batch.slots, batch.tables, batch.seq_lens, batch.cu = (
            batches[0].slots, batches[0].tables, batches[0].seq_lens, batches[0].cu,
        )  # fmt: skip
    batches[1].cos, batches[1].sin = batches[1].sin, batches[1].cos
    steps = [batch.step() for batch in batches[:2]]
    layers = [
        FusedLayer(
            AttentionSublayer(
                norm(HIDDEN, dtype), linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, dtype, kind=kind),
                linear(HIDDEN, HEADS * DIM, dtype), HEADS, KV_HEADS, DIM, scale=0.2, sliding_window=30 * table,
            ),
            MlpSublayer(
                norm(HIDDEN, dtype), linear(2 * 200, HIDDEN, dtype, kind=kind),
                linear(HIDDEN, 200, dtype, kind=kind), "silu",
            ),
            norm(HIDDEN, dtype) if sandwich else None, norm(HIDDEN, dtype) if sandwich else None,
            table_index=table,
        )
        for table, kind in ((0, None), (1, CodeKind.INT4), (0, CodeKind.FP8))
    ]  # fmt: skip
    ours, theirs = [batch.cache for batch in batches], [batch.copy for batch in batches]
    x = torch.randn(len(batches[0].slots), HIDDEN).to(dtype)

    final_norm = norm(HIDDEN, dtype)
    out, total = FusedLayers(layers, final_norm)(x.clone(), count, steps, ours)
    want: Tensor = x.clone()
    residual: Tensor | None = None
    for layer, cache in zip(layers[:count], theirs, strict=False):
        want, residual = layer.attention(want, residual, steps[layer.table_index], cache)
        want = want if layer.after_attention is None else layer.after_attention(want)
        want, residual = layer.mlp(want, residual)
        want = want if layer.after_mlp is None else layer.after_mlp(want)
    assert residual is not None
    if count == len(layers):
        want, residual = final_norm.add_and_norm(want, residual)
    assert torch.equal(out, want) and torch.equal(total, residual)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(pool_of(our), pool_of(their))


def test_fused_layers_have_the_same_bits_with_more_threads_than_cores() -> None:
    """One thread, and 2 to 9 that take the cores from one another between any two items, give the same bits."""
    torch.manual_seed(5)
    layers = [
        FusedLayer(
            AttentionSublayer(
                norm(HIDDEN, torch.bfloat16), linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, torch.bfloat16),
                linear(HIDDEN, HEADS * DIM, torch.bfloat16), HEADS, KV_HEADS, DIM, scale=0.2,
            ),
            MlpSublayer(
                norm(HIDDEN, torch.bfloat16), linear(2 * 224, HIDDEN, torch.bfloat16),
                linear(HIDDEN, 224, torch.bfloat16), "silu",
            ),
            None, None,
        )
        for _ in range(8)
    ]  # fmt: skip
    fused, lens = FusedLayers(layers, norm(HIDDEN, torch.bfloat16)), [(1500, 1), (0, 65), (17, 1), (2100, 1)]
    batches = [Batch(lens, torch.bfloat16) for _ in layers]
    for batch in batches[1:]:
        batch.slots, batch.tables, batch.seq_lens, batch.cu = (
            batches[0].slots, batches[0].tables, batches[0].seq_lens, batches[0].cu,
        )  # fmt: skip
    step, x = batches[0].step(), torch.randn(len(batches[0].slots), HIDDEN).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want, residual = fused(x.clone(), len(layers), [step], [batch.cache for batch in batches])
        for threads in (2, 3, 9, 9, 9):
            torch.set_num_threads(threads)
            out, total = fused(x.clone(), len(layers), [step], [batch.cache for batch in batches])
            assert torch.equal(out, want) and torch.equal(total, residual)
    finally:
        torch.set_num_threads(before)


def test_threads_of_python_compute_at_once() -> None:
    """Each thread has a team of its own, of any size: two that call kernels at once get the bits of one alone."""
    torch.manual_seed(6)
    layers = [linear(512, 512, torch.bfloat16) for _ in range(2)]
    x = torch.randn(70, 512).bfloat16()
    want = [layer(x) for layer in layers]
    start, equal = Barrier(2), [True, True]

    def compute(index: int) -> None:
        start.wait()
        for call in range(30):
            torch.set_num_threads(1 + (call + index) % 4)
            equal[index] &= torch.equal(layers[index](x), want[index])

    before = torch.get_num_threads()
    threads = [Thread(target=compute, args=(index,)) for index in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert equal == [True, True]
