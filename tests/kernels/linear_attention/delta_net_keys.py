"""The keys of the kernels of gated delta nets; see tests/kernels/triton/kernel_keys.py.

The shape is that of Qwen3-Next and Qwen3.5: 16 key heads and 32 value heads of 128, a convolution over 4 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.linear_attention import chunks, convolution, recurrence
from tests.kernels.layers.linear_keys import Key, Keys

_KEY_HEADS, _HEADS, _SIZE = 16, 32, 4


def _sizes(dim: int) -> dict[str, Any]:
    return dict(HEADS=_HEADS, KEY_HEADS=_KEY_HEADS, KEY_DIM=dim, VALUE_DIM=dim)


def convolved(dtype: str, max_query_len: int, gpu: GpuProperties) -> Key:
    launch = convolution.pick_convolution(max_query_len, batch_invariant=False)
    arguments = f"*{dtype} *fp32 *{dtype} *i64 *i32 *i32 *{dtype} i32 i32 i32"
    constants = dict(biases=None, SIZE=_SIZE, ROWS=launch.rows, BLOCK=launch.block)
    return Key(convolution._convolve, arguments, constants, launch.num_warps)


def tokens(dtype: str, dim: int, min_chunked: int, gpu: GpuProperties, *, kind: str = "qwen") -> Key:
    """`min_chunked`: 0 in batch-invariant mode. `kind`: as in delta_nets.py."""
    arguments = f"*{dtype} *{dtype} *{dtype} *fp32 *fp32 *fp32 *{dtype} *fp32 *i64 *i32 *i32 *{dtype} i32 i32 fp32"
    constants = dict(
        **_sizes(dim), SIZE=_SIZE, ROWS=4, MIN_CHUNKED=min_chunked, BETA_SCALE=2.0 if kind == "olmo" else 1.0,
        CHANNEL_DECAYS=kind == "kimi", SIGMOID=kind == "kimi",
    )  # fmt: skip
    return Key(recurrence._compute_tokens, arguments, constants, recurrence.pick_warps(dim, dim))


def prepared(dtype: str, dim: int, gpu: GpuProperties) -> Key:
    launch = chunks.pick_chunks(dim, gpu)
    arguments = f"*{dtype} *{dtype} *fp32 *fp32 *i32 *i32 *{dtype} *{dtype} *fp32 i32 i32"
    constants = dict(**_sizes(dim), CHUNK=launch.chunk, MIN_CHUNKED=chunks.MIN_CHUNKED, INVERSE=launch.inverse)
    return Key(chunks._prepare_chunks, arguments, constants, launch.prepare_warps)


def passed(dtype: str, dim: int, gpu: GpuProperties) -> Key:
    launch = chunks.pick_chunks(dim, gpu)
    arguments = f"*{dtype} *{dtype} *{dtype} *{dtype} *{dtype} *fp32 *{dtype} *fp32 *i64 *i32 *i32 *{dtype} i32 i32 i32"
    constants = dict(
        **_sizes(dim), CHUNK=launch.chunk, MIN_CHUNKED=chunks.MIN_CHUNKED, COLUMNS=launch.columns, SIZE=_SIZE, ROWS=4
    )  # fmt: skip
    return Key(chunks._scan_chunks, arguments, constants, launch.scan_warps, 1)


def gated(dtype: str, dim: int, gpu: GpuProperties) -> Key:
    arguments = f"*{dtype} *fp32 *i32 *i32 *{dtype} i32 i32 i32 fp32"
    launch = chunks.pick_chunks(dim, gpu)
    constants = dict(HEADS=_HEADS, VALUE_DIM=dim, CHUNK=launch.chunk, MIN_CHUNKED=chunks.MIN_CHUNKED)
    return Key(chunks._norm_and_gate, arguments, constants, 4)


DELTA_NET_KEYS: dict[str, Keys] = {
    "delta convolution, decode": partial(convolved, "bf16", 1),
    "delta convolution": partial(convolved, "bf16", 64),
    "delta tokens": partial(tokens, "bf16", 128, chunks.MIN_CHUNKED),
    "delta chunks, scan": partial(passed, "bf16", 128),
    "delta norm": partial(gated, "bf16", 128),
}


def other_delta_net_keys() -> Iterator[tuple[str, Keys]]:
    yield "delta chunks, prepare", partial(prepared, "bf16", 128)  # takes 15 s to compile
    yield "delta tokens, batch-invariant", partial(tokens, "bf16", 128, 0)
    for kind in ("olmo", "kimi"):
        yield f"delta tokens, {kind}", partial(tokens, "bf16", 128, 0, kind=kind)
    yield "delta tokens, 64", partial(tokens, "bf16", 64, chunks.MIN_CHUNKED)
    for dtype in ("fp16", "fp32"):
        yield f"delta tokens, {dtype}", partial(tokens, dtype, 128, chunks.MIN_CHUNKED)
    for dtype, dim in (("bf16", 64), ("fp16", 128)):
        yield f"delta chunks, prepare, {dim}, {dtype}", partial(prepared, dtype, dim)
        yield f"delta chunks, scan, {dim}, {dtype}", partial(passed, dtype, dim)
