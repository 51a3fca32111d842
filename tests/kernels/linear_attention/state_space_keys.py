"""The keys of the kernels of Mamba-2 and of short convolutions; see tests/kernels/triton/kernel_keys.py.

The shapes are those of Nemotron 3 Nano (64 heads of 64 in 8 groups), of Granite 4 H Small (128 heads of 64 in one
group), of Nemotron Nano 2 (128 heads of 80 in 8 groups), all with states of 128, of Falcon-H1 34B (32 heads of 128 in 2
groups, states of 256), and of LFM2 (convolutions over 3 tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.linear_attention import convolution, gated_convolution, mamba2_chunks, mamba2_recurrence
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED
from tests.kernels.layers.linear_keys import Key, Keys


class Mixer(NamedTuple):
    """`norm_size`: elements of a group of the norm; 0 without a norm."""

    heads: int
    head_dim: int
    groups: int
    state: int
    norm_size: int

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(HEADS=self.heads, HEAD_DIM=self.head_dim, GROUPS=self.groups, STATE=self.state)


_NEMOTRON_3 = Mixer(64, 64, 8, 128, 512)
_GRANITE_4 = Mixer(128, 64, 1, 128, 8192)
_NEMOTRON_2 = Mixer(128, 80, 8, 128, 1280)
_FALCON_H1 = Mixer(32, 128, 2, 256, 0)
_WINDOW = dict(SIZE=4, ROWS=4)


def convolved(dtype: str, max_query_len: int, gpu: GpuProperties) -> Key:
    launch = convolution.pick_convolution(max_query_len, batch_invariant=False)
    arguments = f"*{dtype} *fp32 *fp32 *{dtype} *i64 *i32 *i32 *{dtype} i32 i32 i32"
    constants = dict(SIZE=4, ROWS=launch.rows, BLOCK=launch.block)
    return Key(convolution._convolve, arguments, constants, launch.num_warps)


def stepped(dtype: str, mixer: Mixer, min_chunked: int, gpu: GpuProperties) -> Key:
    """`min_chunked`: 0 in batch-invariant mode."""
    launch = mamba2_recurrence.pick_recurrence(mixer.head_dim, mixer.state)
    arguments = f"*{dtype} *{dtype} *fp32 *fp32 *fp32 *{dtype} *fp32 *i64 *i32 *i32 *{dtype} i32 i32 fp32 fp32"
    constants = dict(**mixer.sizes, **_WINDOW, BLOCK=launch.block, MIN_CHUNKED=min_chunked)
    return Key(mamba2_recurrence._step_heads, arguments, constants, launch.num_warps)


def multiplied(dtype: str, mixer: Mixer, gpu: GpuProperties) -> Key:
    launch = mamba2_chunks.pick_scan(mixer.head_dim, mixer.state, gpu)
    constants = dict(**mixer.sizes, CHUNK=launch.chunk, MIN_CHUNKED=MIN_CHUNKED)
    return Key(mamba2_chunks._multiply_chunks, f"*{dtype} *i32 *i32 *fp32 i32", constants, launch.multiply_warps)


def scanned(dtype: str, mixer: Mixer, gpu: GpuProperties) -> Key:
    launch = mamba2_chunks.pick_scan(mixer.head_dim, mixer.state, gpu)
    arguments = f"*{dtype} *{dtype} *fp32 *fp32 *fp32 *fp32 *{dtype} *fp32 *i64 *i32 *i32 *{dtype} i32 i32 fp32 fp32"
    constants = dict(
        **mixer.sizes, CHUNK=launch.chunk, MIN_CHUNKED=MIN_CHUNKED, COLUMNS=launch.columns, **_WINDOW
    )  # fmt: skip
    return Key(mamba2_chunks._scan_heads, arguments, constants, launch.scan_warps, 1)


def gated(dtype: str, mixer: Mixer, gpu: GpuProperties) -> Key:
    launch = mamba2_recurrence.pick_gate(mixer.norm_size)
    scales, others = ("*fp32 ", {}) if mixer.norm_size else ("", dict(scales=None))
    constants = dict(
        INNER=mixer.heads * mixer.head_dim, NORM_SIZE=launch.size, BLOCK=launch.block, NORM_BEFORE_GATE=False, **others
    )
    return Key(mamba2_recurrence._gate_and_norm, f"*{dtype} {scales}*{dtype} i32 fp32", constants, launch.num_warps)


def gated_convolved(dtype: str, max_query_len: int, gpu: GpuProperties) -> Key:
    launch = convolution.pick_convolution(max_query_len, batch_invariant=False)
    arguments = f"*{dtype} *fp32 *{dtype} *i64 *i32 *i32 *{dtype} i32 i32 i32"
    constants = dict(biases=None, SIZE=3, ROWS=launch.rows, BLOCK=launch.block, WINDOW_ROWS=2)
    return Key(gated_convolution._convolve_gated, arguments, constants, launch.num_warps)


def windows_stored(dtype: str, gpu: GpuProperties) -> Key:
    launch = convolution.pick_convolution(64, batch_invariant=False)
    constants = dict(SIZE=3, ROWS=launch.rows, BLOCK=launch.block, WINDOW_ROWS=2)
    return Key(
        gated_convolution._store_windows, f"*{dtype} *{dtype} *i64 *i32 *i32 i32 i32", constants, launch.num_warps
    )


STATE_SPACE_KEYS: dict[str, Keys] = {
    "mamba convolution": partial(convolved, "bf16", 64),
    "mamba tokens": partial(stepped, "bf16", _NEMOTRON_3, MIN_CHUNKED),
    "mamba chunks, multiply": partial(multiplied, "bf16", _NEMOTRON_3),
    "mamba chunks, scan": partial(scanned, "bf16", _NEMOTRON_3),
    "mamba gate, norm of 8192": partial(gated, "bf16", _GRANITE_4),
    "short convolution": partial(gated_convolved, "bf16", 64),
    "short convolution, windows": partial(windows_stored, "bf16"),
}


def other_state_space_keys() -> Iterator[tuple[str, Keys]]:
    yield "mamba convolution, decode", partial(convolved, "bf16", 1)
    yield "mamba tokens, batch-invariant", partial(stepped, "bf16", _NEMOTRON_3, 0)
    yield "mamba tokens, fp32", partial(stepped, "fp32", _NEMOTRON_3, 0)
    yield "mamba chunks, scan, fp16", partial(scanned, "fp16", _NEMOTRON_3)
    for name, mixer in (("one group", _GRANITE_4), ("heads of 80", _NEMOTRON_2), ("states of 256", _FALCON_H1)):
        yield f"mamba tokens, {name}", partial(stepped, "bf16", mixer, MIN_CHUNKED)
        yield f"mamba chunks, scan, {name}", partial(scanned, "bf16", mixer)
    yield "mamba chunks, multiply, states of 256", partial(multiplied, "bf16", _FALCON_H1)
    yield "mamba gate, norm of 512", partial(gated, "bf16", _NEMOTRON_3)
    yield "mamba gate, norm of 1280", partial(gated, "bf16", _NEMOTRON_2)
    yield "mamba gate, no norm", partial(gated, "bf16", _FALCON_H1)
    yield "short convolution, decode", partial(gated_convolved, "bf16", 1)
    yield "short convolution, fp32", partial(gated_convolved, "fp32", 64)
