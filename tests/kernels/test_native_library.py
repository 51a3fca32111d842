"""The C library: its instruction classes, one thread pool with torch, its status, the refusal of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coatcheck.kernels import native
from tests.kernels.cpu_classes import each_class


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


def _status_with(cpu_class: str) -> str:
    """What a process prints that loads the library with this class, or its error."""
    script = "from coatcheck.kernels.native import native_status\nprint(native_status())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "COATCHECK_CPU": cpu_class}
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_variable_picks_a_class_of_this_processor() -> None:
    """COATCHECK_CPU names the class, empty means the best one, and another name is refused with those that can run."""
    library = native.library()
    assert library is not None, "the library is built where tests run"
    assert _status_with("generic") == "native (generic)"
    assert _status_with("") == f"native ({library.available[-1]})"
    refusal = _status_with("sse9")
    assert f"COATCHECK_CPU: expected one of {', '.join(library.available)}" in refusal and "'sse9'" in refusal


def test_a_class_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, the class and those that can run."""
    library = native.library()
    assert library is not None, "the library is built where tests run"
    monkeypatch.setattr(native.Library, "_has", lambda self, name: name != "avx512")
    with pytest.raises(native.CpuClassRefused, match="COATCHECK_CPU: expected one of generic, .*got 'avx512'"):
        native.Library(library.path, "avx512")


def test_every_class_of_this_processor_is_built() -> None:
    """The classes that can run are those whose instructions the kernel of the operating system lists."""
    library = native.library()
    assert library is not None, "the library is built where tests run"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith(("flags", "Features"))).partition(":")[2].split())
    avx2, avx512 = {"avx2", "fma", "f16c"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needs = {
        "generic": set[str](),
        "neon_bf16": {"bf16"},
        "avx2": avx2,
        "avx2_vnni": avx2 | {"avx_vnni"},
        "avx512": avx2 | avx512,
        "avx512_vnni": avx2 | avx512 | {"avx512_vnni"},
        "avx512_bf16": avx2 | avx512 | {"avx512_vnni", "avx512_bf16"},
        "amx": avx2 | avx512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    }
    assert tuple(needs) == native.CLASSES
    assert library.available == [name for name, needed in needs.items() if needed <= flags]


def test_status_names_the_form_in_use() -> None:
    """The status is one short line that a server can report."""
    library, status = native.library(), native.native_status()
    assert library is not None and status == f"native ({library.cpu_class})"


def test_a_foreign_library_is_refused(tmp_path: Path) -> None:
    """A library built from other sources raises OSError or AttributeError when it is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    system = next(Path(line.split()[-1]) for line in lines if "libgomp" in line or "libm.so" in line)
    with pytest.raises((OSError, AttributeError)):
        native.Library(system)
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(OSError):
        native.Library(tmp_path / "broken.so")


@each_class("linear_bf16")
@pytest.mark.usefixtures("cpu_class")
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
