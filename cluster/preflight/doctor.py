"""`coatcheck doctor`: checks a host, and a model if one is given, and says what to change."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from coatcheck.cluster.config.serve_config import DEFAULT_HTTP_PORT, DEFAULT_PORT, ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.host_facts import read_facts
from coatcheck.cluster.preflight.host_report import Finding, judge_host
from coatcheck.cluster.preflight.model import check_model, check_model_directory
from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.attention_selector import AttentionBackendSetting
from coatcheck.workers.gguf.model_path import find_gguf

EPILOG = """\
Examples:

coatcheck doctor

coatcheck doctor /models/Llama-3.1-8B --tp 4 --ray-address HEAD:6379
"""

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, GGUF file or Hugging Face model id to check too.")
    ] = "",
    tp: Annotated[int, typer.Option(min=1, help="Ranks on this host.")] = 1,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The router's port for gRPC.")] = DEFAULT_PORT,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="The router's port for HTTP.")] = DEFAULT_HTTP_PORT,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to reach from here: HOST:PORT or auto.")
    ] = None,
    attention_backend: Annotated[
        AttentionBackendSetting, typer.Option(help="A backend to check for the GPUs of this host and the model.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Check GPU, CPU kernels, driver, NCCL, shared memory, Ray, ports and the model, and say what to change.

    Starts nothing. Exits with 1 if something must be changed.
    """
    findings = judge_host(read_facts((grpc_port, http_port)), tp, attention_backend)
    if ray_address is not None:
        findings.append(_attempt("Ray cluster", lambda: f"it answers at {find_ray(ray_address)}", "start Ray there"))
    if model:
        findings.append(
            _attempt(
                "model", lambda: _check_model(model, tp, attention_backend), "give another model, or mend its files"
            )
        )
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
    if any(finding.state == "error" for finding in findings):
        raise typer.Exit(1)


def _attempt(check: str, run: Callable[[], str], change: str) -> Finding:
    """The finding of a check: `run` returns what it found, or raises CoatcheckError. `change`: what to do if the error
    does not say it."""
    try:
        return Finding(check, "ok", run())
    except CoatcheckError as error:
        found, _, advice = str(error).partition("; ")
        return Finding(check, "error", found, advice or change)


def _check_model(model: str, tp: int, attention_backend: str) -> str:
    if (file := find_gguf(model)) is not None:
        return f"{ModelConfig.open(model).name} can be converted from {file.name}"
    config = ServeConfig.build({"model": model, "tp": tp, "attention_backend": attention_backend})
    check_model_directory(config)
    check_model(config)
    check_checkpoint(config)
    return f"{config.model_name} fits --tp {tp}"


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for finding in findings:
        state = f"[{_COLOURS[finding.state]}]{finding.state:8}[/]"
        console.print(f"{state}{finding.check}: {escape(finding.found)}", highlight=False, soft_wrap=True)
        if finding.change:
            console.print(f"        {finding.change}", highlight=False, soft_wrap=True, markup=False)
