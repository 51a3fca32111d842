"""The machine that a figure was measured on: processor, cores, and versions."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Plain values for a results file, without host names and paths."""
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
