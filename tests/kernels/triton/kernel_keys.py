"""Every Triton kernel's keys: the constants and launch that its launcher would pick for some shape.

The shapes are those of an 8B model (32 query heads over 8 KV heads of 128, blocks of 16) where the key's name does not
say otherwise. Nothing is compiled here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import triton

from coatcheck.kernels.attention import attention_plan, latent_tiles, page_indices, paged_tiles, rotary, tile_launch
from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.kv import copy_blocks, store_kv, transfer_blocks
from coatcheck.kernels.layers import (
    all_reduce_norm,
    grouped_gemm,
    invariant_linear,
    latent_rotary,
    rms_norm,
    route,
    silu_mul,
)
from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.sampling import filter_floor, logprobs, penalties, sample, token_mask
from tests.kernels.layers.expert_keys import grouped, quantised_experts, w8a8_experts
from tests.kernels.layers.linear_keys import CODES, Key, Keys, dequantised, fixed_linear, linear, row_codes, w8a8
from tests.kernels.linear_attention.delta_net_keys import DELTA_NET_KEYS, other_delta_net_keys
from tests.kernels.linear_attention.state_space_keys import STATE_SPACE_KEYS, other_state_space_keys
from tests.kernels.lora.lora_keys import LORA_KEYS, other_lora_keys


class Pool(NamedTuple):
    """Queries of type `q` over a pool of `element`. `quantised`: the KIND of kernels. `bits`: of an element."""

    q: str
    element: str
    quantised: int
    q_bytes: int
    bits: int

    def width(self, dim: int) -> int:
        return dim // 2 if self.quantised == 3 else dim

    @property
    def constants(self) -> dict[str, Any]:
        return dict(KIND=self.quantised, **({} if self.quantised else dict(k_scales=None, v_scales=None)))

    @property
    def scales(self) -> str:
        return "*fp16 *fp16 " if self.quantised else ""

    @property
    def pairs(self) -> str:
        """The types of scales that a kernel reads two at a time."""
        return "*i32 *i32 " if self.quantised else ""


POOLS = {
    "bf16": Pool("bf16", "bf16", 0, 2, 16),
    "fp16": Pool("fp16", "fp16", 0, 2, 16),
    "fp32": Pool("fp32", "fp32", 0, 4, 32),
    "fp8": Pool("bf16", "u8", 1, 2, 8),
    "int8": Pool("bf16", "u8", 2, 2, 8),
    "int4": Pool("bf16", "u8", 3, 2, 4),
}
DIMS = (64, 80, 96, 128, 256)


def tiles(
    kind: str, dim: int, pool: Pool, kv_heads: int, gpu: GpuProperties, *, capped: bool = False
) -> Key:  # fmt: skip
    """`kind`: short, medium, wide, or batch-invariant."""
    invariant = kind == "batch-invariant"
    launches = tile_launch.pick_tiles(
        32, kv_heads, dim, element_size=pool.q_bytes, pool_bits=pool.bits, gpu=gpu, batch_invariant=invariant
    )
    launch: tile_launch.TileLaunch = launches.wide if invariant else getattr(launches, kind)
    arguments = (
        f"*{pool.q} *{pool.element} *{pool.element} {pool.pairs}*i32 *i32 *i32 *fp32 *{pool.q} *fp32 *fp32 *fp32 "
        "i32 i32 i32 i32 i32 i32 fp32 fp32 i32"
    )
    constants = dict(
        DIM=dim, SIZE=16, GROUP=32 // kv_heads, PACK=launch.pack, HEADS=32,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=launch.block_d, SINKS=True,
        PRECISION="ieee" if pool.q == "fp32" else "tf32", CONVERT=launch.convert,
        CAPPED=capped or launch.is_capped, TWO_LOOPS=launch.two_loops,
        UNIT=attention_plan.INVARIANT_UNIT if invariant else 0, **pool.constants,
    )  # fmt: skip
    return Key(paged_tiles._tiles, arguments, constants, launch.num_warps, launch.num_stages)


def latent(kind: str, pool: Pool, heads: int, gpu: GpuProperties, *, shards: int = 1) -> Key:
    """`kind`: short, wide, or batch-invariant; latents of 512 with rotary keys of 64, as DeepSeek's. `shards`: ranks
    over which the tokens of a block are divided, with logarithms of the sums for the merge."""
    invariant = kind == "batch-invariant"
    tiles = latent_tiles.pick_latent_tiles(
        heads, 512, element_size=pool.q_bytes, pool_bits=pool.bits, gpu=gpu, batch_invariant=invariant
    )
    launch = tiles.short if kind == "short" else tiles.wide
    scales = "*fp16 *fp16 " if pool.quantised else ""
    arguments = (
        f"*{pool.q} *{pool.element} *{pool.element} {scales}*i32 *i32 *i32 *{pool.q} "
        f"{'*fp32 ' if shards > 1 else ''}*fp32 *fp32 *fp32 "
        "i32 i32 i32 i32 i32 i32 fp32"
    )
    constants = dict(
        HEADS=heads, PACK=launch.pack, RANK=512, ROPE=64, SIZE=16 // shards, BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n, BLOCK_D=launch.block_d, BLOCK_R=64,
        PRECISION="ieee" if pool.q == "fp32" else "tf32", KIND=pool.quantised,
        CONVERT=launch.convert, UNIT=attention_plan.INVARIANT_UNIT if invariant else 0,
        **({} if pool.quantised else dict(latent_scales=None, rope_scales=None)),
        **({} if shards > 1 else dict(lse=None)),
    )  # fmt: skip
    return Key(latent_tiles._latent_tiles, arguments, constants, launch.num_warps, launch.num_stages)


def latent_store(pool: Pool, gpu: GpuProperties) -> Key:
    element = f"*{pool.element}"
    scales = "*fp16 *fp16 " if pool.quantised else ""
    q = f"*{pool.q}"
    arguments = f"{q} {q} {q} {q} *fp32 *fp32 {element} {element} {scales}*i64 i32 i32 i32 i32 i32 i32 i32 i32 i32"
    constants = dict(
        HEADS=128, ROWS=latent_rotary._HEADS, RANK=512, ROPE=64, SIZE=16, KIND=pool.quantised, HALF=32, BLOCK=512,
        ROPE_BLOCK=64, **({} if pool.quantised else dict(latent_scales=None, rope_scales=None)),
    )  # fmt: skip
    return Key(latent_rotary._latent_rotary, arguments, constants, 4)


def merge(dim: int, gpu: GpuProperties, *, parts: int = 16, has_lse: bool = False) -> Key:
    constants = dict(HEADS=32, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), PARTS=parts, SINKS=not has_lse)
    arguments = "*fp32 *fp32 *fp32 *i32 *i32 *fp32 *bf16"
    if has_lse:
        return Key(paged_tiles._merge, f"{arguments} *fp32", constants, 4)
    return Key(paged_tiles._merge, arguments, constants | dict(lse=None), 4)


def rotary_store(dim: int, pool: Pool, gpu: GpuProperties, *, has_norms: bool = False, rot: int | None = None) -> Key:
    """`has_norms`: q and k are normalised first. `rot`: the elements of a head that are rotated; None: all."""
    q, element = f"*{pool.q}", f"*{pool.element}"
    weights = f"{q} {q} " if has_norms else ""
    strides = "i32 i32 i32 i32 i32 i32 i32"
    arguments = f"{q} {q} {q} *fp32 *fp32 {weights}{q} {element} {element} {pool.scales}*i64 {strides} fp32"
    block = triton.next_power_of_2(dim)
    rows, warps = store_kv.pick_rows(8, block)
    rot = dim if rot is None else rot
    constants = dict(
        HEADS=32, KV_HEADS=8, DIM=dim, ROT=rot, SIZE=16, ROWS=rows, HALF=triton.next_power_of_2(rot // 2),
        BLOCK=block, OFFSET=0.0, **({} if has_norms else dict(q_weight=None, k_weight=None)),
    )  # fmt: skip
    return Key(rotary._rotary, arguments, constants | pool.constants, warps)


def store_quantised(dim: int, pool: Pool, gpu: GpuProperties) -> Key:
    block = triton.next_power_of_2(pool.width(dim))
    rows, warps = store_kv.pick_rows(8, block)
    constants = dict(HEADS=8, DIM=dim, SIZE=16, KIND=pool.quantised, ROWS=rows, BLOCK=block)
    arguments = "*bf16 *bf16 *u8 *u8 *fp16 *fp16 *i64 i32 i32 i32 i32 i32 i32"
    return Key(store_kv._store_quantised, arguments, constants, warps)


def same(*parts: Any) -> Keys:
    """A key that does not depend on the processor."""
    key = Key(*parts)
    return lambda gpu: key


# One for each kernel, and one of those that widen quantised bytes.
KEYS: dict[str, Keys] = {
    "short": partial(tiles, "short", 128, POOLS["bf16"], 8),
    "medium": partial(tiles, "medium", 128, POOLS["bf16"], 8),
    "wide": partial(tiles, "wide", 128, POOLS["bf16"], 8),
    "wide, 64, fp8": partial(tiles, "wide", 64, POOLS["fp8"], 8),
    "batch-invariant": partial(tiles, "batch-invariant", 128, POOLS["bf16"], 8),
    "merge": partial(merge, 128),
    "merge, batch-invariant": partial(merge, 128, parts=1),
    "rms_norm": same(
        rms_norm._rms_norm, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32 i32 fp32 fp32",
        dict(RESIDUAL=True, CAST_FIRST=True, BLOCK=4096, KIND=0, GROUP=0, codes=None, scales=None), 8,
    ),
    "all_reduce_norm": same(
        all_reduce_norm._all_reduce_norm, "*bf16 *bf16 *bf16 *bf16 *bf16 *i64 *i64 *i32 i32 i32 i32 fp32 fp32",
        dict(SIZE=8, PADDED=8, CAST_FIRST=True, BLOCK=8192, KIND=0, GROUP=0, codes=None, scales=None), 16,
    ),
    "silu_mul": same(silu_mul._silu_mul, "*bf16 *bf16 i32 i32", dict(GELU=False, BLOCK=1024)),
    "store_kv": same(
        store_kv._store_kv, "*bf16 *bf16 *bf16 *bf16 *i64 i32 i32 i32 i32", dict(HEADS=8, DIM=128, SIZE=16, BLOCK=1024)
    ),
    "store_quantised": partial(store_quantised, 128, POOLS["fp8"]),
    "copy_blocks": same(copy_blocks._copy_blocks, "*i64 *i64 *i64 i32 i32", dict(BLOCK=2048)),
    "gather_pages": same(page_indices._gather_pages, "*i32 *i32 *i32 i32", dict(BLOCK=1024)),
    "sum_blocks": same(
        transfer_blocks._sum_blocks, "*i64 *i64 *i64 i32 i32", dict(BLOCK=transfer_blocks._WORDS), 8
    ),
    "rotary": partial(rotary_store, 128, POOLS["bf16"]),
    "rotary with norms": partial(rotary_store, 128, POOLS["bf16"], has_norms=True),
    "lane_maxima": same(
        filter_floor._lane_maxima, "*fp32 *fp32 *i32 *fp32 *fp32 *fp32 i32 i32",
        dict(SLICES=filter_floor.SLICES, LANES=filter_floor.LANES, BLOCK=2048), 8,
    ),
    "collect": same(
        filter_floor._collect, "*fp32 *fp32 *i32 *fp32 *fp32 *fp32 *fp32 *i32 *i64 i32 i32",
        dict(
            SLICES=filter_floor.SLICES, LANES=filter_floor.LANES, PLACES=filter_floor.PLACES,
            WANTED=filter_floor._WANTED, BLOCK=2048,
        ),
        8,
    ),
    "filter_floor": same(
        filter_floor._filter_floor, "*fp32 *fp32 *i32 *fp32 *fp32 *fp32 *fp32 *i32 *i64 *fp32 i32 i32",
        dict(SLICES=filter_floor.SLICES, LANES=filter_floor.LANES, PLACES=filter_floor.PLACES, BLOCK=4096), 16,
    ),
    "draw": same(
        sample._draw, "*fp32 *fp32 *fp32 *i64 *i32 *i64 *i64 *i64 *fp32 i32 i32 i32",
        dict(BITS=False, PART=False, BLOCK=2048), 8,
    ),
    "draw, part": same(
        sample._draw, "*fp32 *fp32 *fp32 *i64 *i32 *i64 *i64 *i64 *fp32 i32 i32 i32",
        dict(BITS=False, PART=True, BLOCK=2048), 8,
    ),
    "logprobs": same(logprobs._logprobs, "*fp32 *i64 *fp32 *fp32 *i64 i32 i32", dict(BLOCK=4096), 8),
    "token_mask": same(token_mask._token_mask, "*fp32 *i64 *i32 i32 i32 i32", dict(BLOCK=1024)),
    "count_tokens": same(
        penalties._count_tokens, "*i32 *i32 *i64 *i32 *i32 *fp32 *fp32 *fp32 i32 i32", dict(PARTS=8, BLOCK=1024)
    ),
    "penalise": same(
        penalties._penalise, "*fp32 *i32 *i32 *i64 *i32 *fp32 *fp32 *fp32 i32 i32 i32", dict(PARTS=8, BLOCK=1024)
    ),
    "route": same(
        route._route, "*fp32 *fp32 *i32 *fp32 fp32 fp32 i32 i32",
        dict(TOP_K=8, TOP_GROUPS=4, GROUP_BEST=2, SCORING=1, RENORMALISE=True, LIMITED=True, CORRECTED=True, GROUPS=8,
             SIZE=32, CHOSEN=8), 1,
    ),
    "count_pairs": same(route._count_pairs, "*i32 *i32 i32 i32", dict(BLOCK=1024)),
    "sort_pairs": same(
        route._sort_pairs, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32", dict(EXPERTS=128, TILE=64, BLOCK=1024)
    ),
    "gate_up, many": partial(grouped, grouped_gemm._gate_up, "bf16", 8192),
    "gate_up, few": partial(grouped, grouped_gemm._gate_up, "bf16", 8),
    "down, many": partial(grouped, grouped_gemm._down, "bf16", 8192),
    "down, few": partial(grouped, grouped_gemm._down, "bf16", 8),
    "weighted_sum": same(
        grouped_gemm._weighted_sum, "*bf16 *i32 *fp32 *bf16 *bf16 *bf16 i32 i32 i32", dict(TOP_K=8, BLOCK=1024)
    ),
    "linear, int4, few": partial(linear, CodeKind.INT4, 8, zeros="i8"),
    "linear, fp8, many": partial(linear, CodeKind.FP8, 256, group=0),
    "dequantise, int4": partial(dequantised, CodeKind.INT4),
    "W8A8 linear, fp8, many": partial(w8a8, CodeKind.FP8, 8192, 0),
    **{f"{title}, fp8": partial(row_codes, code, RowFormat(CodeKind.FP8, 0)) for title, code in CODES},
    "W8A8 gate_up, fp8 blocks, many": partial(
        w8a8_experts, grouped_gemm._quantised_gate_up, CodeKind.FP8, 128, 8192
    ),
    "W8A8 down, fp8, few": partial(w8a8_experts, grouped_gemm._quantised_down, CodeKind.FP8, 0, 8),
    "gate_up, int4, many": partial(quantised_experts, grouped_gemm._quantised_gate_up, CodeKind.INT4, 8192),
    "down, fp8, few": partial(quantised_experts, grouped_gemm._quantised_down, CodeKind.FP8, 8, group=0),
    "fixed order, many": partial(fixed_linear, 8192, has_bias=True),
    "fixed order, few": partial(fixed_linear, 8),
    "add_units": same(
        invariant_linear._add_units, "*fp32 *bf16 *bf16 i32 i32 i32 i32 i32 i32", dict(BLOCK=invariant_linear._ADDED)
    ),
    "latent": partial(latent, "short", POOLS["bf16"], 128),
    "latent_rotary": partial(latent_store, POOLS["bf16"]),
    **DELTA_NET_KEYS,
    **STATE_SPACE_KEYS,
    **LORA_KEYS,
}  # fmt: skip


_GROUPS = {CodeKind.INT8: 0, CodeKind.INT4: 128, CodeKind.FP8: 0, CodeKind.FP4: 32}  # columns of a group; 0: a row
# Kinds and groups of weights whose zero points may be fractions: GGUF's Q4_K, Q5_K and Q2_K, and HQQ's.
_FRACTIONS = ((CodeKind.INT4, 32), (CodeKind.INT8, 32), (CodeKind.INT4, 16), (CodeKind.INT4, 64))


def _others() -> Iterator[tuple[str, Keys]]:
    for dim in DIMS:
        for name, pool in POOLS.items():
            # Medium and batch-invariant tiles differ from wide ones in rows alone.
            for kind in ("short", "medium", "wide", "batch-invariant") if dim == 128 else ("short", "wide"):
                if (dim, name) != (128, "bf16") and (kind, dim, name) != ("wide", 64, "fp8"):
                    yield f"{kind}, {dim}, {name}", partial(tiles, kind, dim, pool, 8)
        if dim != 128:
            yield f"merge, {dim}", partial(merge, dim)
            yield f"rotary, {dim}, bf16", partial(rotary_store, dim, POOLS["bf16"])
    for name, pool in POOLS.items():
        yield f"short, 128, {name}, MHA", partial(tiles, "short", 128, pool, 32)
        yield f"short, 128, {name}, MQA", partial(tiles, "short", 128, pool, 1)
        if name != "bf16":
            yield f"rotary, 128, {name}", partial(rotary_store, 128, pool)
            yield f"rotary with norms, 128, {name}", partial(rotary_store, 128, pool, has_norms=True)
    for name in ("bf16", "int4"):
        yield (
            f"rotary with norms, 64 of 256, {name}",
            partial(rotary_store, 256, POOLS[name], has_norms=True, rot=64),
        )
    for dim, name in ((128, "bf16"), (128, "fp8"), (128, "int4"), (256, "bf16"), (256, "int4")):
        for kind in ("short", "wide"):
            yield f"{kind}, {dim}, {name}, capped", partial(tiles, kind, dim, POOLS[name], 8, capped=True)
    for kernel, title in ((grouped_gemm._gate_up, "gate_up"), (grouped_gemm._down, "down")):
        for tokens, count in ((8192, "many"), (8, "few")):
            yield f"{title}, {count}, fp32", partial(grouped, kernel, "fp32", tokens)
            yield f"{title}, {count}, gpt-oss", partial(grouped, kernel, "bf16", tokens, oss=True)
    for code in CodeKind:
        if code is not CodeKind.INT4:
            yield f"dequantise, {code.name.lower()}", partial(dequantised, code, group=_GROUPS[code])
    for code, group in _FRACTIONS:
        key = partial(dequantised, code, group=group, zeros="fp32")
        yield f"dequantise, {code.name.lower()} {group}, fp32 zeros", key
    for rows, count in ((8, "few"), (64, "some"), (8192, "many")):
        for code in CodeKind:
            name = f"linear, {code.name.lower()}, {count}"
            if name not in KEYS:
                yield name, partial(linear, code, rows, group=_GROUPS[code])
        yield f"linear, int4, {count}, act-order", partial(linear, CodeKind.INT4, rows, zeros="i8", is_ordered=True)
        yield f"linear, int4, {count}, fp32", partial(linear, CodeKind.INT4, rows, dtype="fp32")
        for code, group in _FRACTIONS:
            key = partial(linear, code, rows, group=group, zeros="fp32")
            yield f"linear, {code.name.lower()} {group}, {count}, fp32 zeros", key
    for rows, count in ((8, "few"), (8192, "many")):
        for code, group in _FRACTIONS:
            key = partial(linear, code, rows, group=group, zeros="fp32", batch_invariant=True)
            yield f"linear, {code.name.lower()} {group}, {count}, fp32 zeros, batch-invariant", key
        for code in CodeKind:
            key = partial(linear, code, rows, group=_GROUPS[code], batch_invariant=True)
            yield f"linear, {code.name.lower()}, {count}, batch-invariant", key
        yield f"fixed order, {count}, fp32", partial(fixed_linear, rows, dtype="fp32")
    yield "fixed order, 16 heads", partial(fixed_linear, 8192, heads=16)
    for title, product in (("gate_up", grouped_gemm._quantised_gate_up), ("down", grouped_gemm._quantised_down)):
        for tokens, count in ((8192, "many"), (8, "few")):
            for code in CodeKind:
                if (name := f"{title}, {code.name.lower()}, {count}") not in KEYS:
                    yield name, partial(quantised_experts, product, code, tokens, group=_GROUPS[code])
            yield (
                f"{title}, int4, {count}, fp32",
                partial(quantised_experts, product, CodeKind.INT4, tokens, dtype="fp32"),
            )
            yield (
                f"{title}, int4 32, {count}, fp32 zeros",
                partial(quantised_experts, product, CodeKind.INT4, tokens, group=32, zeros="fp32"),
            )
            for code, group in ((CodeKind.FP8, 0), (CodeKind.FP8, 128), (CodeKind.INT8, 0)):
                name = f"W8A8 {title}, {code.name.lower()}{' blocks' if group else ''}, {count}"
                if name not in KEYS:
                    yield name, partial(w8a8_experts, product, code, group, tokens)
    for name, pool in POOLS.items():
        for kind, heads in (("short", 128), ("short", 16), ("wide", 16), ("batch-invariant", 16)):
            if (name, kind, heads) != ("bf16", "short", 128):
                yield f"latent, {kind}, {name}, {heads} heads", partial(latent, kind, pool, heads)
        yield f"latent, short, {name}, 128 heads, 8 shards", partial(latent, "short", pool, 128, shards=8)
        if name != "bf16":
            yield f"latent_rotary, {name}", partial(latent_store, pool)
    for rows, count in ((8, "few"), (64, "some"), (8192, "many")):
        for code in (CodeKind.FP8, CodeKind.INT8):
            name = f"W8A8 linear, {code.name.lower()}, {count}"
            if name not in KEYS:
                yield name, partial(w8a8, code, rows, 0)
        yield f"W8A8 linear, fp8 blocks, {count}", partial(w8a8, CodeKind.FP8, rows, 128)
    blocks = RowFormat(CodeKind.FP8, 128)
    for title, codes in CODES:
        yield f"{title}, int8", partial(row_codes, codes, RowFormat(CodeKind.INT8, 0))
        yield f"{title}, fp8 blocks", partial(row_codes, codes, blocks)
    yield "rms_norm, fp8 blocks, plain too", partial(row_codes, rms_norm._rms_norm, blocks, keeps_plain=True)
    yield (
        "all_reduce_norm, fp8 blocks, plain too",
        same(
            all_reduce_norm._all_reduce_norm,
            "*bf16 *bf16 *bf16 *bf16 *u8 *fp32 *bf16 *i64 *i64 *i32 i32 i32 i32 fp32 fp32",
            dict(SIZE=8, PADDED=8, CAST_FIRST=True, BLOCK=8192, **blocks.constants()), 16,
        ),
    )  # fmt: skip
    yield "merge, 512, lse", partial(merge, 512, has_lse=True)
    for name in ("int8", "int4"):
        yield f"store_quantised, 128, {name}", partial(store_quantised, 128, POOLS[name])
    yield from other_delta_net_keys()
    yield from other_state_space_keys()
    yield from other_lora_keys()


OTHERS = dict(_others())
