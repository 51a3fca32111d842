"""What `coatcheck doctor` says of a host: each fault with what to change."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coatcheck.cluster.preflight.host_facts import Gpu, HostFacts, TorchFacts, probe_torch, read_facts
from coatcheck.cluster.preflight.host_report import Finding, judge_host

H100 = Gpu("H100", 80 * 2**30, (9, 0))
TORCH = TorchFacts("2.13.0", "13.0", (H100, H100), "2.27.5")
GOOD = HostFacts(
    has_gpu_file=True,
    torch=TORCH,
    driver="580.65.06",
    shared_memory=2 * 2**30,
    locked_memory=None,
    infiniband=("mlx5_0",),
    has_verbs=True,
    compiler="/usr/bin/gcc",
    open_files=65536,
    busy_ports={},
    ray="2.60.0",
)


def faults(facts: HostFacts, ranks: int = 2) -> list[Finding]:
    """The findings that are not ok."""
    return [finding for finding in judge_host(facts, ranks) if finding.state != "ok"]


def test_nothing_is_wrong_with_a_good_host() -> None:
    """Every check says what it found, and nothing is to be changed."""
    findings = judge_host(GOOD, 2)
    assert not faults(GOOD) and not any(finding.change for finding in findings)
    checks = [finding.check for finding in findings]
    assert checks == [
        *("GPU 0", "GPU 1", "driver", "NCCL", "InfiniBand", "shared memory", "attention", "Ray", "port", "open files"),
    ]
    assert findings[2].found == "NVIDIA 580.65.06, and torch is built for CUDA 13.0"


def test_an_attention_backend_is_compared_with_the_host() -> None:
    """Installed libraries are named. A named one is a warning, because no GPU has run it, or an error with what to
    change if the host has no such library or no such GPU."""

    def judged(setting: str, facts: HostFacts) -> Finding:
        (finding,) = (each for each in judge_host(facts, 1, setting) if each.check == "attention")
        return finding

    both = replace(GOOD, attention_libraries=("flashinfer", "fa3"))
    assert judged("auto", GOOD) == Finding("attention", "ok", "triton")
    assert judged("auto", both).found == "triton; flashinfer and fa3 can be chosen"
    chosen = judged("flashinfer", both)
    assert chosen.state == "warning" and "no GPU has run it from Coatcheck" in chosen.found
    absent = judged("flashinfer", GOOD)
    assert absent.state == "error" and absent.change.startswith("install it on every host with `pip install")
    old = replace(both, torch=TorchFacts("2.13.0", "13.0", (Gpu("A100", 80 * 2**30, (8, 0)),), "2.27.5"))
    assert judged("fa3", old).found.endswith("needs compute capability 9.0 (H100, H200), and the GPU has 8.0")
    cpus = replace(both, torch=TorchFacts("2.13.0+cpu"))
    assert judged("fa3", cpus).state == judged("triton", cpus).state == "error"


def test_a_host_without_gpus_computes_on_cpus() -> None:
    """That is no fault, and neither NCCL nor a compiler is missed."""
    torch = TorchFacts("2.13.0+cpu")
    cpus = replace(GOOD, has_gpu_file=False, torch=torch, driver="", infiniband=(), compiler="")
    assert not faults(cpus)
    small = replace(cpus, shared_memory=64 * 2**20)
    assert not faults(small, ranks=30)
    (finding,) = faults(small, ranks=40)
    assert finding.change.startswith("give it 81 MiB, 3 MiB for each rank (Docker: --shm-size")


def test_the_cpu_kernels_are_named_with_the_classes_that_can_be_forced() -> None:
    """The report has the form of the kernels that the ready line has, and what COATCHECK_CPU may be. Missing kernels
    are a fault where no GPU computes."""
    torch = TorchFacts("2.13.0+cpu", kernels="native (avx2)", cpu_classes=("generic", "avx2"))
    cpus = replace(GOOD, has_gpu_file=False, torch=torch, driver="")
    (finding,) = [one for one in judge_host(cpus, 2) if one.check == "CPU kernels"]
    assert finding == Finding("CPU kernels", "ok", "native (avx2); COATCHECK_CPU can force one of generic, avx2")
    missing = "torch reference (native library not built)"
    (finding,) = faults(replace(cpus, torch=TorchFacts("2.13.0+cpu", kernels=missing)))
    assert (finding.state, finding.found) == ("warning", missing) and "C compiler" in finding.change
    assert not faults(replace(GOOD, torch=replace(TORCH, kernels=missing)))


def test_a_forced_class_that_the_processor_lacks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says which classes COATCHECK_CPU may name."""
    monkeypatch.setenv("COATCHECK_CPU", "z80")
    problem = probe_torch(False).kernels_problem
    assert "expected one of generic" in problem and "'z80'" in problem
    (finding,) = faults(replace(GOOD, torch=replace(TORCH, kernels_problem=problem)))
    assert (finding.check, finding.state) == ("CPU kernels", "error") and "unset COATCHECK_CPU" in finding.change


def test_kernels_that_cannot_be_imported_are_not_blamed_on_a_setting() -> None:
    """The advice is to install again where COATCHECK_CPU is not what stops the kernels."""
    (finding,) = faults(replace(GOOD, torch=replace(TORCH, kernels_problem="No module named 'coatcheck.kernels'")))
    assert finding.state == "error" and finding.change == "install Coatcheck again on this host"


@pytest.mark.parametrize(
    ("facts", "check", "state", "found", "change"),
    [
        ({"torch": TorchFacts("2.13.0+cpu")}, "GPU", "error", "is a CPU build", "PyTorch's CUDA build"),
        ({"torch": TorchFacts("2.13.0", "13.0")}, "GPU", "error", "sees no GPU", "update the driver"),
        ({"torch": TorchFacts(problem="driver too old")}, "GPU", "error", "driver too old", "update the driver"),
        ({"torch": replace(TORCH, gpus=(replace(H100, capability=(7, 5)), H100))}, "GPU 0", "warning", "7.5", "8.0"),
        ({"torch": replace(TORCH, gpus=(H100,))}, "GPUs", "error", "1 for 2 ranks", "--tp of at most 1"),
        ({"torch": replace(TORCH, nccl="")}, "NCCL", "error", "none", "--tp above 1 needs it"),
        ({"has_verbs": False}, "InfiniBand", "error", "no libibverbs", "install libibverbs1"),
        ({"locked_memory": 65536}, "InfiniBand", "warning", "65,536 bytes", "LimitMEMLOCK=infinity"),
        ({"shared_memory": 64 * 2**20}, "shared memory", "warning", "has 64 MiB", "--shm-size"),
        ({"compiler": ""}, "C compiler", "error", "none", "install gcc"),
        ({"ray": ""}, "Ray", "error", "not installed", "coatcheck[node]"),
        ({"ray": "2.9.3"}, "Ray", "error", "2.9.3", "install Ray 2.50 or later"),
        ({"busy_ports": {8000: "Address in use"}}, "port", "error", "8000: Address in use", "--http-port"),
        ({"open_files": 1024}, "open files", "warning", "1024 files", "ulimit -n 65536"),
    ],
)
def test_each_fault_says_what_to_change(
    facts: dict[str, object], check: str, state: str, found: str, change: str
) -> None:
    """One fault, one finding."""
    (finding,) = faults(replace(GOOD, **facts))  # type: ignore[arg-type]  # names and types are HostFacts'
    assert (finding.check, finding.state) == (check, state)
    assert found in finding.found and change in finding.change


def test_the_least_ray_is_that_of_the_package() -> None:
    """The version that the report asks for is the one in pyproject.toml."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"ray>=2.50"' in project


def test_facts_of_this_host() -> None:
    """A port where something listens, or that is given twice, is named with the reason; one that is free is not."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        facts = read_facts((port, 9, 9))
        assert facts.busy_ports == {port: "Address already in use", 9: "given twice"}
    assert facts.ray and facts.torch.version and not facts.torch.problem
    assert facts.torch.kernels and not facts.torch.kernels_problem


def test_a_driver_is_looked_for_where_there_is_a_gpu(tmp_path: Path) -> None:
    """A CUDA build of torch that finds no driver is a problem on a host with a GPU, and none on a host without."""
    (tmp_path / "torch.py").write_text(_CUDA_BUILD_WITHOUT_DRIVER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert probe_torch(True, str(python)).problem == "Found no NVIDIA driver"
    without = probe_torch(False, str(python))
    assert (without.version, without.cuda, without.gpus, without.problem) == ("2.13.0+cu130", "13.0", (), "")
    wordless = _CUDA_BUILD_WITHOUT_DRIVER.replace("Found no NVIDIA driver", "")
    (tmp_path / "torch.py").write_text(wordless)
    assert probe_torch(True, str(python)).problem == "RuntimeError('')"


_CUDA_BUILD_WITHOUT_DRIVER = """
MESSAGE = "Found no NVIDIA driver"
from types import SimpleNamespace

def init():
    raise RuntimeError(MESSAGE)

__version__ = "2.13.0+cu130"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(device_count=lambda: 0, init=init)
distributed = SimpleNamespace(is_nccl_available=lambda: False)
"""


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'ImportError: libcudart.so.12' >&2; exit 1", "ImportError: libcudart.so.12"),
        ("kill -SEGV $$", "ended with"),
    ],
)
def test_a_torch_that_cannot_be_tried(script: str, problem: str, tmp_path: Path) -> None:
    """A broken driver may crash the process that tries it; the command goes on and says so."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert problem in probe_torch(True, str(python)).problem
