"""The command behind `coatcheck verify`: verifies a model and prints what it does, a JSON object on each line.

    python -m coatcheck.workers.verification.verify_process '{"directory": "/models/x", "max_model_len": null}'

prints {"stage": …} before each stage, and at the end either the fields of Verification or {"error": …, "message": …}.
It runs in a process of its own, so that torch and transformers do not stay in the caller's memory.
"""

import json
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.verification.verification import verify_model


def main() -> None:
    """Verify the model that the first argument names."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        verification = verify_model(
            Path(settings["directory"]), settings["max_model_len"], lambda stage: _print({"stage": stage})
        )
    except (InvalidConfig, InvalidModel) as refusal:
        _print({"error": type(refusal).__name__, "message": str(refusal)})
    else:
        _print(asdict(verification))


def _print(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
