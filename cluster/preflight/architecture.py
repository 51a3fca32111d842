"""ArchitectureCheck: whether ranks could serve a local model of a type that no test covers.

For tested model types the checks of config.json suffice (see model_check.py), and nothing is built. For others a child
process builds the model without weights, as a rank will. That takes some seconds, because it imports torch and
transformers, but it refuses a model before Ray starts; a rank would refuse it after most of a minute.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES

_MOST_SECONDS: Final = 600.0  # then the check counts as crashed
_ERRORS: Final = {error.__name__: error for error in (InvalidConfig, InvalidModel)}


def check_architecture(config: ServeConfig, console: Console) -> None:
    """Raises the error that a rank would raise before it reads weights. Prints what it checks and how long that took.

    Skipped for a hub id, and if an existing Ray cluster is joined. If the check itself crashes nothing is refused: the
    ranks check again.
    """
    if config.ray_address is not None or not Path(config.model_source).is_dir():
        return
    model_type = ModelConfig.open(config.model_source).model_type
    if model_type in TESTED_MODEL_TYPES:
        return
    began = time.monotonic()
    console.print(
        f"checking whether {model_type} can be served, which no test covers: this loads torch and takes some seconds",
        soft_wrap=True,
        markup=False,
    )
    said = _run_servable(config)
    if error := _ERRORS.get(said.get("error", "")):
        raise error(said["message"])
    result = f"{model_type} can be served" if said else "the check failed, so the ranks will check"
    console.print(f"{result} (checked in {time.monotonic() - began:.1f} s)", soft_wrap=True, markup=False)


def _run_servable(config: ServeConfig) -> dict[str, Any]:
    """The object that `coatcheck.workers.servable` prints; empty if the process crashes or takes too long."""
    settings = dict(
        model=config.model_source,
        tp=config.tp,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        # Only Ray knows the device of `auto`.
        deterministic_on=config.device if config.deterministic and config.device != "auto" else None,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "coatcheck.workers.servable", json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {}
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
