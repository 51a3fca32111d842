"""`coatcheck verify`: compares a small copy of a model with transformers, without the model's weights."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from coatcheck.cluster.command import EXIT_USAGE
from coatcheck.cluster.planner.model_config import ModelConfig, read_config
from coatcheck.cluster.preflight.architecture import child_environment
from coatcheck.proto.errors import InvalidConfig, InvalidModel

EPILOG = """\
Examples:

coatcheck verify demo/model

coatcheck verify zai-org/GLM-4.5-Air --json
"""

_ERRORS: Final = {error.__name__: error for error in (InvalidConfig, InvalidModel)}


def verify(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, a GGUF file, a config.json or a Hugging Face model id.")
    ],
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="As for `serve`. Default: the model's own length.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a small copy of MODEL with transformers: in one step, in chunks, beside a neighbour, on a cached prefix.

    The copy has the same config.json with small sizes, and random weights in float32, so MODEL's weights are not
    needed. Starts nothing, and exits with 2 if MODEL cannot be served or if its logits differ.
    """
    config = ModelConfig.open(model)
    try:
        result = _run(config, read_config(model), max_model_len, show_progress=not as_json)
    except (InvalidConfig, InvalidModel) as refusal:
        if not as_json:
            raise
        print(json.dumps({"model": config.name, "verified": False, "reason": str(refusal)}))
        raise typer.Exit(EXIT_USAGE) from None
    if as_json:
        print(json.dumps({"model": config.name, "verified": True} | result))
        return
    print(
        f"{config.name} ({result['model_type']}) equals transformers {result['transformers']} in a copy with "
        f"{result['layers']} layers, computed {', '.join(result['cases'])} ({result['seconds']:.1f} s)"
    )


def _run(config: ModelConfig, text: bytes, max_model_len: int | None, *, show_progress: bool) -> dict[str, Any]:
    """The fields of Verification. `text`: of config.json. Raises the error that the child process reports."""
    from rich.console import Console

    last: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        # transformers reads the file under this name only.
        (Path(directory) / "config.json").write_bytes(text)
        with Console(stderr=True).status(f"{config.name}: loading torch and transformers") as status:
            for last in _messages({"directory": directory, "max_model_len": max_model_len}):
                if show_progress and "stage" in last:
                    status.update(f"{config.name}: {last['stage']}")
    if error := _ERRORS.get(last.get("error", "")):
        raise error(last["message"].replace(f"{directory}/config.json", f"{config.name}: config.json"))
    if "seconds" not in last:
        raise InvalidModel(
            f"{config.name} cannot be verified: the process that computes its small copy ended early; run the command "
            "again with more free memory"
        )
    return last


def _messages(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the child process prints, as it prints it."""
    command = [sys.executable, "-P", "-m", "coatcheck.workers.verification.verify_process", json.dumps(settings)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(),
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                try:
                    message = json.loads(line)
                except ValueError:  # a library that prints
                    continue
                if isinstance(message, dict):
                    yield message
        finally:
            child.kill()
