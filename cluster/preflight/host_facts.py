"""read_facts(): what a host has that serving needs, as plain values; host_report.py judges them.

torch is imported in a process of its own, which may crash in a broken driver without ending the command.
"""

import ctypes.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from coatcheck.cluster.preflight.machine import has_gpu_file
from coatcheck.workers.core.attention_selector import installed_libraries

_PROBE_SECONDS: Final = 120.0
_PROBE: Final = """
import json, sys, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": "", "problem": ""}
found.update(kernels="", cpu_classes=[], kernels_problem="")
try:
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        torch.zeros(1, device=index).item()
        found["gpus"].append([device.name, device.total_memory, device.major, device.minor])
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if "gpu" in sys.argv and torch.version.cuda and not found["gpus"]:
        torch.cuda.init()
except Exception as error:
    found["problem"] = (str(error) or repr(error)).splitlines()[0]
try:
    from coatcheck.kernels import native
    library = native.library()
    found.update(kernels=native.native_status(), cpu_classes=library.available if library else [])
except Exception as error:
    found["kernels_problem"] = (str(error) or repr(error)).splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Gpu:
    """`memory`: bytes. `capability`: compute capability, (9, 0) for an H100."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchFacts:
    """`cuda`: the CUDA version that torch was built for, "" for a CPU build. `nccl`: its version, "" without.
    `problem`: why the GPUs, or torch itself, cannot be used; "" if they can. `kernels`: the form of the CPU kernels,
    as the ready line names it. `cpu_classes`: those that COATCHECK_CPU may name, the best one last.
    `kernels_problem`: why the CPU kernels cannot be used."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    nccl: str = ""
    problem: str = ""
    kernels: str = ""
    cpu_classes: tuple[str, ...] = ()
    kernels_problem: str = ""


@dataclass(frozen=True)
class HostFacts:
    """`driver`: NVIDIA's, "" without. `shared_memory`: bytes of /dev/shm. `locked_memory`: bytes that a process may
    lock, None for no limit. `infiniband`: devices. `has_verbs`: whether NCCL finds libibverbs. `compiler`: the C
    compiler's path, "" without. `busy_ports`: why a port cannot be used, by port. `ray`: its version, "" without.
    `attention_libraries`: flashinfer and fa3, if Python finds them."""

    has_gpu_file: bool
    torch: TorchFacts
    driver: str
    shared_memory: int
    locked_memory: int | None
    infiniband: tuple[str, ...]
    has_verbs: bool
    compiler: str
    open_files: int
    busy_ports: dict[int, str]
    ray: str
    attention_libraries: tuple[str, ...] = ()


def read_facts(ports: Sequence[int]) -> HostFacts:
    """The facts of this host. `ports`: those where a router is to listen."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    infiniband = Path("/sys/class/infiniband")
    has_gpu = has_gpu_file(Path("/dev"))
    return HostFacts(
        has_gpu_file=has_gpu,
        torch=probe_torch(has_gpu),
        driver=_driver(),
        shared_memory=shm.f_blocks * shm.f_frsize if shm else 0,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=tuple(sorted(file.name for file in infiniband.iterdir())) if infiniband.is_dir() else (),
        has_verbs=ctypes.util.find_library("ibverbs") is not None,
        compiler=shutil.which("gcc") or shutil.which("cc") or "",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        busy_ports={
            port: why for port in ports if (why := "given twice" if ports.count(port) > 1 else _port_error(port))
        },
        ray=_version("ray"),
        attention_libraries=tuple(installed_libraries()),
    )


def probe_torch(has_gpu: bool, python: str = sys.executable) -> TorchFacts:
    """What torch sees of the GPUs, and whether it can compute there.

    `has_gpu`: whether the host has a GPU's device file. Without one, a CUDA build of torch that finds no driver is no
    problem: PyPI has no other build for Linux on x86.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE, *["gpu"] * has_gpu], capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return TorchFacts(problem=f"torch could not be tried: {type(error).__name__}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        return TorchFacts(problem=lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple(Gpu(name, memory, (major, minor)) for name, memory, major, minor in found["gpus"])
    return TorchFacts(
        found["version"],
        found["cuda"] or "",
        gpus,
        found["nccl"],
        found["problem"],
        found["kernels"],
        tuple(found["cpu_classes"]),
        found["kernels_problem"],
    )


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", file.read_text()) if file.exists() else None
    return found[1] if found else ""


def _port_error(port: int) -> str:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return str(error.strerror).partition(" (")[0]
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
