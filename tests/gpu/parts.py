"""The parts, and the cases of each. A case is "PART: NAME"."""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch

from tests.gpu import adapters, architectures, families, kernels, quantised


class Part(Protocol):
    """`LIMIT`: seconds after which a case's process is killed."""

    LIMIT: float

    def names(self, whole: bool) -> list[str]:
        """Names of the cases, those that take longest first. `whole`: all of them."""

    def run(self, name: str, device: torch.device, folder: Path) -> str:
        """What was measured. Raises Refused, Skipped, and anything else for a failure. `folder`: an empty one."""


PARTS: dict[str, Part] = {
    "kernels": kernels, "families": families, "quantised": quantised, "architectures": architectures,
    "adapters": adapters,
}  # fmt: skip


def list_cases(only: str, *, whole: bool) -> list[str]:
    """The cases that begin with one of `only`, which are separated by commas. All cases if `only` is ""."""
    every = [f"{part}: {name}" for part, module in PARTS.items() for name in module.names(whole)]
    chosen = tuple(prefix.strip() for prefix in only.split(",") if prefix.strip())
    return [case for case in every if not chosen or case.startswith(chosen)]


def limit_of(case: str) -> float:
    return PARTS[case.partition(": ")[0]].LIMIT


def run_case(case: str, device: torch.device) -> str:
    part, _, name = case.partition(": ")
    with TemporaryDirectory() as folder:
        try:
            return PARTS[part].run(name, device, Path(folder))
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
