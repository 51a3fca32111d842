"""judge_host(): what is wrong with a host, and what to change. Pure: the facts come from host_facts.py."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from coatcheck.cluster.preflight.host_facts import HostFacts, TorchFacts
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.attention_selector import NEVER_RUN, backend_name, check_backend_host

_RANK_SHM: Final = 2**30  # NCCL and the ranks of a host share memory there
_CPU_RANK_SHM: Final = 2**21 + 64  # the buffers and counters of a rank in workers/distributed/shm_collectives.py
_OPEN_FILES: Final = 65536
_LEAST_CAPABILITY: Final = (8, 0)  # the kernels are compiled and tested for it and later ones
_LEAST_RAY: Final = (2, 50)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. `change`: what to do; "" if nothing."""

    check: str
    state: Literal["ok", "warning", "error"]
    found: str
    change: str = ""


def judge_host(facts: HostFacts, ranks: int, attention_backend: str = "auto") -> list[Finding]:
    """Every finding, in the order in which to act on them. `ranks`: the number of ranks on this host."""
    return [
        *_judge_gpus(facts, ranks),
        *_judge_cpu_kernels(facts.torch),
        *_judge_driver(facts),
        *_judge_nccl(facts, ranks),
        *_judge_infiniband(facts),
        _judge_shared_memory(facts, ranks),
        *_judge_compiler(facts),
        *_judge_attention(facts, attention_backend),
        _judge_ray(facts),
        *_judge_ports(facts),
        _judge_open_files(facts),
    ]


def _judge_gpus(facts: HostFacts, ranks: int) -> Iterator[Finding]:
    torch = facts.torch
    if torch.gpus:
        if ranks > len(torch.gpus):
            change = (
                f"give a --tp of at most {len(torch.gpus)}, for the ranks of this host; each needs a GPU of its own"
            )
            yield Finding("GPUs", "error", f"{len(torch.gpus)} for {ranks} ranks", change)
        for index, gpu in enumerate(torch.gpus):
            number = (
                f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            )
            if gpu.capability < _LEAST_CAPABILITY:
                change = (
                    "use a GPU of compute capability 8.0 or later (Ampere); the kernels were not tried on older ones"
                )
                yield Finding(f"GPU {index}", "warning", number, change)
            else:
                yield Finding(f"GPU {index}", "ok", number)
    elif facts.has_gpu_file and not torch.cuda and not torch.problem:
        change = "install PyTorch's CUDA build, of the version in constraints.txt"
        yield Finding("GPU", "error", f"there is a GPU, and torch {torch.version} is a CPU build", change)
    elif facts.has_gpu_file or torch.problem:
        change = "update the driver to one for that CUDA, give the container its GPUs, or free the GPU"
        yield Finding("GPU", "error", torch.problem or f"torch {torch.version} sees no GPU", change)
    else:
        yield Finding("GPU", "ok", f"none; ranks compute on CPUs (torch {torch.version})")


def _judge_cpu_kernels(torch: TorchFacts) -> Iterator[Finding]:
    if torch.kernels_problem:
        is_refused = torch.kernels_problem.startswith("COATCHECK_CPU")
        change = "unset COATCHECK_CPU, or name one of these" if is_refused else "install Coatcheck again on this host"
        yield Finding("CPU kernels", "error", torch.kernels_problem, change)
    elif torch.cpu_classes:
        choices = ", ".join(torch.cpu_classes)
        yield Finding("CPU kernels", "ok", f"{torch.kernels}; COATCHECK_CPU can force one of {choices}")
    elif torch.kernels:
        change = "install again on this host, where a C compiler is; without the kernels CPUs are several times slower"
        yield Finding("CPU kernels", "ok" if torch.gpus else "warning", torch.kernels, "" if torch.gpus else change)


def _judge_driver(facts: HostFacts) -> Iterator[Finding]:
    if facts.driver:
        built = f", and torch is built for CUDA {facts.torch.cuda}" if facts.torch.cuda else ""
        yield Finding("driver", "ok", f"NVIDIA {facts.driver}{built}")


def _judge_nccl(facts: HostFacts, ranks: int) -> Iterator[Finding]:
    if facts.torch.nccl:
        yield Finding("NCCL", "ok", facts.torch.nccl)
    elif facts.torch.gpus and ranks > 1:
        yield Finding("NCCL", "error", "torch has none", "install a build of torch with NCCL; --tp above 1 needs it")


def _judge_infiniband(facts: HostFacts) -> Iterator[Finding]:
    if not facts.infiniband:
        return
    devices = ", ".join(facts.infiniband)
    if not facts.has_verbs:
        change = "install libibverbs1, ibverbs-providers and librdmacm1; without them NCCL uses TCP"
        yield Finding("InfiniBand", "error", f"{devices}, and no libibverbs", change)
    elif facts.locked_memory is not None:
        change = "allow unlimited locked memory (`ulimit -l unlimited`, LimitMEMLOCK=infinity); NCCL locks its buffers"
        yield Finding("InfiniBand", "warning", f"{devices}; {facts.locked_memory:,} bytes may be locked", change)
    else:
        yield Finding("InfiniBand", "ok", devices)


def _judge_shared_memory(facts: HostFacts, ranks: int) -> Finding:
    rank_size = _RANK_SHM if facts.torch.gpus or facts.has_gpu_file else _CPU_RANK_SHM
    found = f"/dev/shm has {_describe_size(facts.shared_memory)}"
    if facts.shared_memory >= ranks * rank_size:
        return Finding("shared memory", "ok", found)
    wanted, of_rank = _describe_size(ranks * rank_size), _describe_size(rank_size)
    change = f"give it {wanted}, {of_rank} for each rank (Docker: --shm-size; the chart: worker.sharedMemory)"
    return Finding("shared memory", "warning", found, change)


def _describe_size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{math.ceil(size / 2**20)} MiB"


def _judge_compiler(facts: HostFacts) -> Iterator[Finding]:
    if facts.torch.gpus and not facts.compiler:
        yield Finding("C compiler", "error", "none", "install gcc; Triton compiles a launcher for each kernel with it")


def _judge_attention(facts: HostFacts, setting: str) -> Iterator[Finding]:
    """Yields nothing if the host has no GPU and the operator names no backend."""
    name = backend_name(setting)
    try:
        check_backend_host(
            setting,
            device="cuda" if facts.torch.gpus else "cpu",
            capabilities=[gpu.capability for gpu in facts.torch.gpus],
            is_installed=name in facts.attention_libraries,
        )
    except InvalidConfig as refusal:
        found, _, change = str(refusal).partition("; ")
        yield Finding("attention", "error", found, change)
        return
    if name != "triton":
        change = "compare answers and speed with --attention-backend triton on this host first"
        yield Finding("attention", "warning", f"{name}: {NEVER_RUN}", change)
    elif facts.torch.gpus:
        others = f"; {' and '.join(facts.attention_libraries)} can be chosen" if facts.attention_libraries else ""
        yield Finding("attention", "ok", f"triton{others}")


def _judge_ray(facts: HostFacts) -> Finding:
    if not facts.ray:
        return Finding("Ray", "error", "it is not installed", "run `pip install coatcheck[node]`")
    version = tuple(int(part) for part in re.findall(r"\d+", facts.ray)[:2])
    if version < _LEAST_RAY:
        least = ".".join(map(str, _LEAST_RAY))
        return Finding("Ray", "error", facts.ray, f"install Ray {least} or later, the same version on every host")
    return Finding("Ray", "ok", facts.ray)


def _judge_ports(facts: HostFacts) -> Iterator[Finding]:
    for port, why in facts.busy_ports.items():
        change = "end what listens there, or choose another --grpc-port or --http-port"
        yield Finding("port", "error", f"{port}: {why}", change)
    if not facts.busy_ports:
        yield Finding("port", "ok", "the router's ports are free")


def _judge_open_files(facts: HostFacts) -> Finding:
    found = f"{facts.open_files} files may be open at once"
    if facts.open_files >= _OPEN_FILES or facts.open_files < 0:  # -1: no limit
        return Finding("open files", "ok", found if facts.open_files >= 0 else "no limit")
    return Finding("open files", "warning", found, f"raise it (`ulimit -n {_OPEN_FILES}`, LimitNOFILE)")
