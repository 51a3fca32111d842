"""Checks whether a rank could serve a local checkpoint, without Ray and without reading weights.

    python -m coatcheck.workers.servable '{"model": "/models/x", "tp": 2, …}'

prints one JSON object, {"error": …, "message": …}: the error that a rank would raise, or empty strings. The check runs
in a process of its own, so that torch and transformers do not stay in the caller's memory.
"""

import json
import sys
from typing import Any

import torch

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.meta_model import prepare_model
from coatcheck.workers.verification.verification import verify_once


def find_refusal(
    model: str,
    *,
    tp: int,
    dtype: str,
    max_model_len: int | None,
    deterministic_on: str | None,
    expert_parallel: bool,
    verify: bool,
) -> InvalidConfig | InvalidModel | None:
    """The error that a rank would raise before it reads weights, or None.

    `deterministic_on`, `expert_parallel`: see prepare_model. `verify`: also compare a small copy with transformers, as
    verify_once does.
    """
    try:
        with Checkpoint.open(model) as checkpoint:
            prepare_model(
                checkpoint,
                TpShard(0, tp),
                dtype=dtype,
                device=torch.device("cpu"),
                max_model_len=max_model_len,
                deterministic_on=torch.device(deterministic_on) if deterministic_on else None,
                expert_parallel=expert_parallel,
            )
            if verify:
                verify_once(checkpoint.directory, max_model_len)
    except (InvalidConfig, InvalidModel) as refusal:
        return refusal
    return None


def main() -> None:
    """Print the result for the settings in the first argument, a JSON object."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    refusal = find_refusal(settings.pop("model"), **settings)
    error, message = (type(refusal).__name__, str(refusal)) if refusal else ("", "")
    print(json.dumps({"error": error, "message": message}), flush=True)


if __name__ == "__main__":
    main()
