"""The C library: one thread pool with torch, its status, and the refusal of other libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coatcheck.kernels import native
from tests.kernels.processor import needs_avx512_bf16


def test_one_openmp_pool_is_mapped() -> None:
    """torch and the C library share one libgomp. Two thread pools would compete for the same cores."""
    assert native.library() is not None, "the library is built where tests run"
    script = (
        "import torch\nfrom coatcheck.kernels.layers.rms_norm import RmsNorm\n"
        "RmsNorm(torch.ones(600), 1e-6)(torch.randn(600, 600)); torch.randn(900, 900) @ torch.randn(900, 900)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'omp5' in line}\n"
        "print(len(maps), maps)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 "), done.stdout


def test_status_names_the_form_in_use() -> None:
    """The status is one short line that a server can report."""
    status = native.native_status()
    assert status.startswith("native (" if native.library() is not None else "torch reference (")
    assert "\n" not in status


def test_a_foreign_library_is_refused(tmp_path: Path) -> None:
    """A library built from other sources raises OSError or AttributeError when it is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    system = next(Path(line.split()[-1]) for line in lines if "libgomp" in line or "libm.so" in line)
    with pytest.raises((OSError, AttributeError)):
        native.Library(system)
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(OSError):
        native.Library(tmp_path / "broken.so")


@needs_avx512_bf16
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """One and two threads of torch give the same bits."""
    from coatcheck.kernels.layers.linear import PackedLinear

    linear, x = PackedLinear(torch.randn(200, 64).bfloat16()), torch.randn(40, 64).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(x)
        torch.set_num_threads(2)
        assert linear.form == "native" and torch.equal(one, linear(x))
    finally:
        torch.set_num_threads(before)
