"""check_architecture: whether ranks can serve a local model of a type that the tests do not cover.

For tested model types check_model suffices. For other types a child process builds the model without weights, as a
rank does, and compares a small copy with transformers (workers/verification). That takes some seconds, because it
imports torch and transformers. A rank would refuse the model only after most of a minute.
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

_TIMEOUT_SECONDS: Final = 600.0
_ERRORS: Final = {error.__name__: error for error in (InvalidConfig, InvalidModel)}


def check_architecture(config: ServeConfig, console: Console) -> None:
    """Raise the error that a rank would raise before it reads weights. Print the model type and the time taken.

    Skipped for a model id, and if `serve` joins a Ray cluster. A check that crashes refuses nothing: ranks check again.
    """
    if config.ray_address is not None or not Path(config.model_source).is_dir():
        return
    model_type = ModelConfig.open(config.model_source).model_type
    if model_type in TESTED_MODEL_TYPES:
        return
    began = time.monotonic()
    console.print(
        f"checking whether model type {model_type} can be served: this loads torch and takes some seconds",
        soft_wrap=True,
        markup=False,
    )
    answer = _run_servable(config)
    if error := _ERRORS.get(answer.get("error", "")):
        advice = "; docs/models.md lists the types that are served" if "cannot be served" in answer["message"] else ""
        raise error(answer["message"] + advice)
    result = f"{model_type} can be served" if answer else "the check failed, so the ranks will check"
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
        expert_parallel=config.expert_parallel,
        verify=not config.skip_verify,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "coatcheck.workers.servable", json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=child_environment(),
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {}
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def child_environment() -> dict[str, str]:
    """The environment of a process that computes small models: without GPUs, whose memory the ranks need."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
