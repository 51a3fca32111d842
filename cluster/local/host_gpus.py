"""Chooses the device of a cluster without Ray, and the GPU of each rank. Ray does both where it runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.preflight.machine import has_gpu_file
from coatcheck.proto.errors import InvalidConfig

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_COUNT: Final = (sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())")


def choose_gpus(config: ServeConfig, devices: Path = Path("/dev")) -> tuple[str, list[str]]:
    """("cuda", the GPU of each rank as CUDA_VISIBLE_DEVICES has it) or ("cpu", nothing).

    Device auto is cuda if torch finds a GPU. Raises InvalidConfig if there are fewer GPUs than ranks.
    """
    if config.device == "cpu" or not has_gpu_file(devices):
        return "cpu", []
    found = _count_gpus()
    if found == 0 and config.device == "auto":
        return "cpu", []
    ranks = config.groups * config.tp
    if found < ranks:
        raise InvalidConfig(
            f"{counted(config.groups, 'group')} with tp {config.tp} need {counted(ranks, 'GPU')}, and torch finds "
            f"{found} on this host; lower --groups or --tp, or use --device cpu"
        )
    return "cuda", name_gpus(os.environ.get(_VISIBLE), found)[:ranks]


def name_gpus(visible: str | None, found: int) -> list[str]:
    """The names of the first `found` GPUs in `visible`, the value of CUDA_VISIBLE_DEVICES; None: all of the host."""
    names = [name.strip() for name in visible.split(",")] if visible is not None else []
    return names[:found] if names else [str(index) for index in range(found)]


def _count_gpus() -> int:
    """In a process of its own: this one needs no torch."""
    done = subprocess.run(_COUNT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0
