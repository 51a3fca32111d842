"""A kernel's key compiled ahead of time without a GPU, and what the binary uses.

    python -m tests.kernels.triton.ahead_of_time [TARGET ...] [--first] [--missing]

compiles every key of kernel_keys.py for each target and writes the table of kernels/compiled_keys.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_89, SM_90, SM_100, SM_120
from tests.kernels.layers.linear_keys import Key
from tests.kernels.triton.kernel_keys import KEYS, OTHERS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
GPUS = {
    "sm_80": SM_80, "sm_89": SM_89, "sm_90": SM_90, "sm_100": SM_100, "sm_120": SM_120, "gfx942": GFX942
}  # fmt: skip


class Usage(NamedTuple):
    """`registers`: of a thread. `shared`: bytes of a program. `spilled`: bytes that a thread spills."""

    registers: int
    shared: int
    spilled: int


# Arguments that need not divide by 16: a width of the vocabulary, or a count.
_NOT_ALIGNED = ("vocab", "words", "inner")


def compiled(key: Key, target: str) -> Any:
    names = key.kernel.arg_names
    runtime = iter(key.arguments.split())
    signature = {name: "constexpr" if name in key.constants else next(runtime) for name in names}
    assert next(runtime, None) is None, "a type too many"
    constants = {(names.index(name),): value for name, value in key.constants.items()}
    # Triton finds at a launch that torch's pointers and our strides divide by 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, parameter in enumerate(key.kernel.params)
        if not parameter.do_not_specialize and signature[names[i]][0] in "*i" and names[i] not in _NOT_ALIGNED
    }
    source = ASTSource(key.kernel, signature, constants, aligned)
    # The AMD backend takes one or two stages where NVIDIA's takes more.
    amd = TARGETS[target].backend == "hip"
    stages = min(key.num_stages, 2) if amd else key.num_stages
    options = dict(num_warps=key.num_warps, num_stages=stages, enable_fp_fusion=key.fuses)
    return triton.compile(source, target=TARGETS[target], options=options)


def usage(binary: Any, target: str) -> Usage:
    """Read from the binary: NVIDIA's with its own tool, AMD's from the notes of its assembly."""
    if TARGETS[target].backend == "hip":
        notes = binary.asm["amdgcn"]
        registers, spilled = (
            int(re.findall(rf"\.{name}:\s*(\d+)", notes)[0]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return Usage(registers, binary.metadata.shared, 4 * spilled)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        text = subprocess.run([str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    numbers = {kind: int(number) for kind, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(numbers["REG"], binary.metadata.shared, numbers["STACK"] + numbers["LOCAL"])


_PAGE = """# Registers, shared memory and spills

The table shows for each key, compiled ahead of time without a GPU: registers of a thread, KiB of shared memory of a
program, and bytes that a thread spills. A key is a kernel with the launch parameters for one shape. Unless the key says
otherwise the shape is 32 query heads over 8 KV heads of 128 in bfloat16 (MHA: 32 KV heads; MQA: one; capped: with a
soft-cap; short, medium and wide: tiles of attention; batch-invariant: of the deterministic mode); of latent attention
128 heads over latents of 512 and rotary keys of 64; of experts 128, with 8 for each of 8192 tokens (many) or 8 (few);
of linears, over quantised weights or in a fixed order, 4096 features of 4096 columns and 8192 rows (many), 64 (some) or
8 (few); of gated delta nets (delta) 16 key heads and 32 value heads of 128; of Mamba-2 (mamba) 64 heads of 64 in 8
groups, states of 128; of short convolutions 3 tokens; of LoRA adapters rank 16 in a QKV of 6144 features and 4096
columns. Blocks: a scale for 128 columns. `make test` compiles the first {first} keys for sm_90, one of each kernel for
gfx942, and for the others one of each kernel with matrix products or FP8; `make test-all` compiles all of them. On
sm_90 no key may spill. A cell with - was not compiled when the table was written. none: the GPU does not run the kernel
(W8A8 where it has no such products).
Written by `python -m tests.kernels.triton.ahead_of_time`, with triton {version}.

| key | {targets} |
|---|{lines}
"""


def read_cells(page: str) -> dict[tuple[str, str], str]:
    """The cells of a table, by (key, target)."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    head, bodies = (rows[0], rows[2:]) if rows else ([], [])
    return {(name, target): cell for name, *cells in bodies for target, cell in zip(head[1:], cells, strict=True)}


def write_cells(cells: dict[tuple[str, str], str]) -> str:
    """The page with these cells; a cell that is missing is a dash."""
    rows = [f"| {name} | {' | '.join(cells.get((name, to), '-') for to in TARGETS)} |" for name in KEYS | OTHERS]
    text = _PAGE.format(
        first=len(KEYS), version=triton.__version__, targets=" | ".join(TARGETS), lines="---|" * len(TARGETS)
    )
    return text + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default=[*TARGETS], help="others keep their cells")
    parser.add_argument("--first", action="store_true", help="compile the keys of `make test` alone")
    parser.add_argument("--missing", action="store_true", help="compile only what the table has no cell for")
    options = parser.parse_args()
    keys = KEYS | OTHERS
    page = Path(__file__).parents[3] / "kernels/compiled_keys.md"
    cells = read_cells(page.read_text())
    for name, key in (KEYS if options.first else keys).items():
        for target in options.targets:
            if options.missing and cells.get((name, target), "-") != "-":
                continue
            launched = key(GPUS[target])
            if launched is None:
                cells[name, target] = "none"
                continue
            found = usage(compiled(launched, target), target)
            cells[name, target] = f"{found.registers}, {found.shared / 1024:.4g} KiB, {found.spilled}"
            if found.shared > GPUS[target].shared or found.spilled:
                print(f"{name} on {target}: {found}", flush=True)
            page.write_text(write_cells(cells))
    page.write_text(write_cells(cells))


if __name__ == "__main__":
    main()
