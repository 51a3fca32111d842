"""The C kernels of arm64, built by a cross compiler and run in an emulator. On arm64 all other tests run them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

_ROOT = Path(__file__).parents[2]
_COMPILER, _EMULATOR = which("aarch64-linux-gnu-gcc"), which("qemu-aarch64-static") or which("qemu-aarch64")
_FLAGS = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Werror", "-Ikernels/csrc"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (_COMPILER and _EMULATOR), reason="needs gcc-aarch64-linux-gnu and qemu-user"),
]


def _build(program: Path, cpu_class: str, *flags: str) -> None:
    """Compile the check for a class, with the class's linears and the attention of `generic`."""
    attention = program.with_suffix(".o")
    command = [str(_COMPILER), *_FLAGS]
    generic = [*command, "-DCPU_CLASS=generic", "-c", "kernels/csrc/attention/attention.c", "-o", str(attention)]
    subprocess.run(generic, cwd=_ROOT, check=True)
    names = ("cpu", "linear", "pack_weight", "team")
    sources = ["tests/kernels/arm64_check.c", *(f"kernels/csrc/{name}.c" for name in names)]
    whole = [*command, *flags, f"-DCPU_CLASS={cpu_class}", *sources, str(attention), "-lm", "-o", str(program)]
    subprocess.run(whole, cwd=_ROOT, check=True)


def _run(program: Path, processor: str) -> subprocess.CompletedProcess[str]:
    system = {**os.environ, "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu", "OMP_NUM_THREADS": "1"}
    command = [str(_EMULATOR), "-cpu", processor, str(program)]
    return subprocess.run(command, capture_output=True, text=True, env=system)


def test_neon_computes_linears_and_attention(tmp_path: Path) -> None:
    """The class generic gives what the formulas give on the oldest arm64 processor."""
    _build(tmp_path / "check", "generic")
    done = _run(tmp_path / "check", "cortex-a53")
    assert done.returncode == 0, done.stdout + done.stderr


def test_neon_bf16_computes_linears_where_the_processor_has_bf16(tmp_path: Path) -> None:
    """The dot products of neon_bf16 give what the formula gives, for one row and for many."""
    _build(tmp_path / "check", "neon_bf16", "-march=armv8.2-a+bf16")
    done = _run(tmp_path / "check", "max")
    assert done.returncode == 0, done.stdout + done.stderr
