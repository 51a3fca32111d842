"""ArchitectureCheck: whether ranks could serve a local model, where only building the model can tell.

For model types that the tests cover config.json says enough (see model_check.py), and nothing is built. For others a
process of its own builds the model without weights, as a rank will: it imports torch and transformers, which takes
seconds, and still tells before Ray starts what a rank would tell after most of a minute.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..proto.errors import InvalidConfig, InvalidModel
from ..workers.known_architectures import TESTED_MODEL_TYPES
from .config import ServeConfig
from .model_config import ModelConfig

_MOST_SECONDS: Final = 600.0  # for a check that hangs: the ranks then tell
_ERRORS: Final = {error.__name__: error for error in (InvalidConfig, InvalidModel)}


def check_architecture(config: ServeConfig, console: Console) -> None:
    """Raises what a rank would raise before it reads weights; says on the console what it does, and for how long.

    Skipped for a hub id, and where an existing Ray cluster is joined. A check that crashes refuses nothing: the ranks
    will say what is wrong.
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
    said = _ask(config)
    if error := _ERRORS.get(said.get("error", "")):
        raise error(said["message"])
    result = f"{model_type} can be served" if said else "the ranks will tell"
    console.print(f"{result} (checked in {time.monotonic() - began:.1f} s)", soft_wrap=True, markup=False)


def _ask(config: ServeConfig) -> dict[str, Any]:
    """The object that `coatcheck.workers.servable` prints; empty if the process crashes or takes too long."""
    settings = dict(
        model=config.model_source,
        tp=config.tp,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        # The device `auto` is known only to Ray.
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
