"""Each Triton kernel compiled ahead of time, without a GPU: for NVIDIA's sm_80, sm_90 and sm_100 and AMD's gfx942.

One key per kernel and target, in bfloat16 with the shapes of an 8B model (head_dim 128, GQA 4). On sm_90 the kernels
must not spill registers. The launch parameters are those that the launchers pick.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coatcheck.kernels import copy_blocks, paged_decode, paged_prefill, rms_norm, rotary, sample, silu_mul, store_kv


class Key(NamedTuple):
    kernel: Any
    arguments: str  # one type per run-time argument, in the kernel's order
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


DECODE, PREFILL = paged_decode.pick_launch(4, 128, 2), paged_prefill.pick_launch(4096, 128, 128, 2)
TILE = dict(DIM=128, SIZE=16, GROUP=4, HEADS=32, PRECISION="tf32", NATIVE=False)
FLOATS = dict(KIND=0, k_scales=None, v_scales=None)
KEYS = {
    "decode": Key(
        paged_decode._decode,
        "*bf16 *bf16 *bf16 *i32 *i32 *i32 *fp32 *fp32 *fp32 i64 i64 i64 i64 i64 i64 fp32 fp32 i32 i32",
        dict(TILE, **FLOATS, KV_HEADS=8, SPLIT_SIZE=paged_decode.SPLIT, BLOCK_M=DECODE.block_m, BLOCK_N=DECODE.block_n,
             BLOCK_D=DECODE.block_d), DECODE.num_warps, DECODE.num_stages,
    ),
    "reduce": Key(
        paged_decode._reduce, "*fp32 *fp32 *fp32 *i32 *i32 *fp32 *bf16 i32",
        dict(HEADS=32, DIM=128, SPLIT_SIZE=paged_decode.SPLIT, BLOCK_D=128, SINKS=True), 1,
    ),
    "prefill": Key(
        paged_prefill._prefill, "*bf16 *bf16 *bf16 *i32 *i32 *i32 *fp32 *bf16 i64 i64 i64 i64 i64 i64 fp32 fp32 i32",
        dict(TILE, **FLOATS, BLOCK_M=PREFILL.block_m, BLOCK_N=PREFILL.block_n, BLOCK_D=PREFILL.block_d, SINKS=True),
        PREFILL.num_warps, PREFILL.num_stages,
    ),
    "rms_norm": Key(
        rms_norm._rms_norm, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i64 i64 i64 i64 i32 fp32 fp32",
        dict(RESIDUAL=True, CAST_FIRST=True, BLOCK=4096), 8,
    ),
    "silu_mul": Key(silu_mul._silu_mul, "*bf16 *bf16 i64 i32", dict(GELU=False, BLOCK=1024)),
    "store_kv": Key(
        store_kv._store_kv, "*bf16 *bf16 *bf16 *bf16 *i64 i64 i64 i64 i64", dict(HEADS=8, DIM=128, SIZE=16, BLOCK=1024)
    ),
    "copy_blocks": Key(copy_blocks._copy_blocks, "*i64 *i64 *i64 i64 i64", dict(BLOCK=2048)),
    "rotary": Key(
        rotary._rotary,
        "*bf16 *bf16 *bf16 *fp32 *fp32 *bf16 *bf16 *bf16 *bf16 *i64 i64 i64 i64 i64 i64 i64 i64 i64 i64",
        dict(FLOATS, HEADS=32, DIM=128, ROT=128, SIZE=16, STORE=True, BLOCK=128), 1,
    ),
    "draw": Key(
        sample._draw, "*fp32 *fp32 *fp32 *i64 *i32 *i64 *i64 *i64 i64 i32", dict(BITS=False, BLOCK=2048), 8
    ),
}  # fmt: skip
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compiled(key: Key, target: GPUTarget) -> Any:
    names = key.kernel.arg_names
    runtime = iter(key.arguments.split())
    signature = {name: "constexpr" if name in key.constants else next(runtime) for name in names}
    assert next(runtime, None) is None, "a type too many"
    constants = {(names.index(name),): value for name, value in key.constants.items()}
    # What a launch finds on its own: torch's pointers and our strides divide by 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or signature[name] == "i64"
    }
    source = ASTSource(key.kernel, signature, constants, aligned)
    # The AMD backend takes one or two stages where NVIDIA's takes more.
    stages = min(key.num_stages, 2) if target.backend == "hip" else key.num_stages
    options = dict(num_warps=key.num_warps, num_stages=stages, enable_fp_fusion=True)
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KEYS)
def test_compiles_without_a_gpu(name: str, target: str, tmp_path: Path) -> None:
    """The kernel compiles for the target; on sm_90 the binary has no stack and no local memory, hence no spills."""
    binary = compiled(KEYS[name], TARGETS[target])
    if target != "sm_90":
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    spilled = {kind: int(bytes_) for kind, bytes_ in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
    assert spilled == {"STACK": 0, "LOCAL": 0}, usage
    registers = re.findall(r"REG:(\d+)", usage)[0]
    print(f"{name}: {registers} registers, {binary.metadata.shared} bytes of shared memory")
    assert binary.metadata.shared <= 227 * 1024
