"""The results file of a benchmark, and what it says of the machine that the figures were measured on."""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write_results(path: Path | None, figures: Any) -> None:
    """Replace the file, so that a reader never sees half of one. Without a path do nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(figures, indent=1) + "\n")
        part.replace(path)


def update_results(path: Path | None, **parts: dict[str, Any]) -> None:
    """Replace these parts of the file, each with the machine beside its figures, and keep the others."""
    if path is not None:
        known = json.loads(path.read_text()) if path.exists() else {}
        write_results(path, known | {name: {**describe_machine(), **figures} for name, figures in parts.items()})


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load and versions, without host names and paths."""
    processor = "unknown"
    if (facts := Path("/proc/cpuinfo")).exists():
        models = [line for line in facts.read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    names = ("torch", "transformers", "ray", "grpcio")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "versions": {name: version(name) for name in names},
    }
