"""Decode and prefill in Triton's interpreter, over pools of every kind; run by interpreted.py."""

import torch
import triton

from coatcheck.kernels.attention.paged_decode import DecodeLaunch, launch_decode
from coatcheck.kernels.attention.paged_prefill import PrefillLaunch, launch_prefill
from tests.kernels.attention_batch import Batch, close
from tests.kernels.caches import QUANTISED
from tests.kernels.triton.agreement import SENTINEL

Dtypes = tuple[torch.dtype, ...]


def attention(first: torch.dtype = torch.float32, *others: torch.dtype) -> None:
    """Three shapes in the first dtype and the last shape in the others; then with other launch parameters."""
    lengths = [(1, 1), (1, 15), (16, 16), (1, 17), (5, 257), (1, 600), (0, 0), (20, 33)]
    shapes = ((6, 2, 32, 0, 0.0, False), (4, 4, 16, 13, 5.0, True), (3, 1, 80, 20, 0.0, True))
    for dtype in (first, *others):
        for heads, kv_heads, dim, window, softcap, with_sinks in shapes if dtype == first else shapes[-1:]:
            batch = Batch(lengths, heads, kv_heads, dim, dtype)
            sinks = torch.randn(heads) if with_sinks else None
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            arguments = batch.arguments()
            launch_decode(*arguments, batch.scale, window, softcap, sinks, out)
            assert (out[2:18] == SENTINEL).all(), "the decode kernel wrote into a prefill's rows"
            decoded = out[:2].clone()
            launch_prefill(*arguments, 20, batch.scale, window, softcap, sinks, out)
            assert torch.equal(out[:2], decoded), "the prefill kernel wrote into a decode's rows"
            want = batch.reference(window, softcap, sinks)
            close(out, want)
            narrow = DecodeLaunch(16, 16, triton.next_power_of_2(dim), 4, 1)
            launch_decode(
                *arguments, batch.scale, window, softcap, sinks, out, programs=3, launch=narrow, split=64
            )  # fmt: skip
            wide = PrefillLaunch(64, 32, triton.next_power_of_2(dim), 4, 1)
            launch_prefill(*arguments, 20, batch.scale, window, softcap, sinks, out, launch=wide)
            close(out, want)


def batch_invariant(dtypes: Dtypes = (torch.float32, torch.float16), quantised: torch.dtype = torch.float32) -> None:
    """A query has the same bits alone, in a short chunk and in a whole prompt, with neighbours and without; over int8
    as `quantised`."""
    for dtype, pool in (*zip(dtypes, dtypes, strict=True), (quantised, torch.int8)):
        whole = Batch([(45, 45), (3, 20)], 4, 2, 32, dtype, 16, pool)
        options = (whole.scale, 30, 5.0, torch.randn(4))
        want, have = torch.empty_like(whole.q), torch.empty_like(whole.q)
        launch_prefill(*whole.arguments(), 45, *options, want, True)
        tables = whole.block_tables[:1]
        for first, last in ((0, 1), (1, 2), (2, 20), (20, 44), (44, 45)):
            seq_lens = torch.tensor([last], dtype=torch.int32)
            cu_seqlens = torch.tensor([0, last - first], dtype=torch.int32)
            rows = (whole.q[first:last].contiguous(), whole.cache, tables, seq_lens, cu_seqlens)
            launch_prefill(*rows, last - first, *options, have[first:last], True)
        assert torch.equal(have[:45], want[:45])
        close(want, whole.reference(*options[1:]))


DIMS = (64, 80, 96, 128, 256)
POOLS = (torch.float32, torch.float16, *QUANTISED)
HEADS = ((2, 2), (4, 2), (3, 1))  # MHA, GQA, MQA
OPTIONS = ((0, 0.0, False), (13, 0.0, False), (0, 5.0, False), (0, 0.0, True), (20, 5.0, True))  # window, cap, sinks


def matrix(whole: bool = False, pools: Dtypes = POOLS) -> None:
    """Every head size with every pool, and a sample of the other features; `whole`: every combination."""
    for d, dim in enumerate(DIMS):
        for p, pool in enumerate(pools):
            for h, heads in enumerate(HEADS):
                for o, options in enumerate(OPTIONS):
                    if whole or (h == (d + p) % len(HEADS) and o == (d + 2 * p) % len(OPTIONS)):
                        window, cap, with_sinks = options
                        cell(dim, pool, *heads, window, cap, with_sinks, size=(8, 16, 32)[(d + p + o) % 3])


def cell(
    dim: int, pool: torch.dtype, heads: int, kv_heads: int, window: int, softcap: float, with_sinks: bool, size: int
) -> None:
    """Both kernels in one batch: a full last block, a last block of one token, a shared prefix, and unused rows."""
    dtype = pool if pool in (torch.float16, torch.bfloat16) else torch.float32
    batch = Batch([(1, 2 * size + 1), (18, 33), (1, size), (0, 0)], heads, kv_heads, dim, dtype, size, pool)
    batch.block_tables[2] = batch.block_tables[0]
    sinks = torch.randn(heads) if with_sinks else None
    out = torch.full((len(batch.q) + 2, heads, dim), SENTINEL).to(dtype)
    q = torch.cat((batch.q, batch.q[:2]))
    arguments = (q, *batch.arguments()[1:])
    launch_decode(*arguments, batch.scale, window, softcap, sinks, out)
    assert (out[1:19] == SENTINEL).all(), "the decode kernel wrote into a prefill's rows"
    launch_prefill(*arguments, 18, batch.scale, window, softcap, sinks, out)
    assert (out[len(batch.q) :] == SENTINEL).all(), "a row past the last sequence was written"
    close(out[: len(batch.q)], batch.reference(window, softcap, sinks))


def long() -> None:
    """Nine splits and one key, and the first chunk that sees past a split; an empty batch launches nothing."""
    batch = Batch([(1, 4097), (2, 513)], 2, 1, 64, torch.float32)
    out = torch.full(batch.q.shape, SENTINEL)
    arguments = batch.arguments()
    launch_decode(*arguments, batch.scale, 0, 0.0, None, out)
    launch_prefill(*arguments, 2, batch.scale, 0, 0.0, None, out)
    close(out, batch.reference())
    counted = torch.full(batch.q.shape, SENTINEL)
    launch_prefill(*arguments, 2, batch.scale, 0, 0.0, None, counted, num_prefills=1)
    assert torch.equal(counted[1:], out[1:]), "programs for one prompt among decodes were too few"
    launch_decode(*arguments, batch.scale, 600, 0.0, None, out)  # splits in which everything is masked
    close(out[:1], batch.reference(600)[:1])
    empty = Batch([], 2, 1, 64, torch.float32)
    launch_decode(*empty.arguments(), 1.0, 0, 0.0, None, empty.q)
    launch_prefill(*empty.arguments(), 1, 1.0, 0, 0.0, None, empty.q)


def quantised(one: torch.dtype = torch.float32, other: torch.dtype = torch.float16) -> None:
    """Decode and prefill over pools of every other dtype."""
    lengths = [(1, 1), (1, 17), (9, 33), (1, 530)]
    for kv in (*QUANTISED, torch.float16):
        for dtype, (heads, kv_heads, dim, window, softcap) in (
            (one, (6, 2, 32, 0, 0.0)),
            (other, (3, 1, 80, 20, 5.0)),
        ):
            batch = Batch(lengths, heads, kv_heads, dim, dtype, kv=kv)
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            arguments = batch.arguments()
            launch_decode(*arguments, batch.scale, window, softcap, None, out)
            launch_prefill(*arguments, 9, batch.scale, window, softcap, None, out)
            close(out, batch.reference(window, softcap))
