"""`coatcheck doctor`: one line a check, what to change below it, JSON for scripts, and the exit code."""

import json
import socket
from pathlib import Path

from tests.cluster.running_server import coatcheck

_CHANGE = {"check", "state", "found", "change"}


def test_a_model_and_a_ray_cluster(tiny_model: Path) -> None:
    """A model that can be served is ok; a Ray cluster that does not answer is an error, and the exit code says so."""
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        grpc, http = (server.getsockname()[1] for server in (first, second))
        ports = ["--grpc-port", str(grpc), "--http-port", str(http)]
        done = coatcheck("doctor", str(tiny_model), *ports, "--ray-address", "127.0.0.1:1", "--json")
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)
    assert all(finding.keys() == _CHANGE for finding in findings)
    states = {finding["check"]: finding["state"] for finding in findings}
    assert states["model"] == "ok" and states["Ray cluster"] == "error"
    assert [finding["found"].partition(":")[0] for finding in findings if finding["check"] == "port"] == [
        str(grpc),
        str(http),
    ]


def test_a_model_that_cannot_be_served(tmp_path: Path) -> None:
    """Text says what is wrong and, indented below it, what to change."""
    done = coatcheck("doctor", str(tmp_path / "none"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    index = next(number for number, line in enumerate(lines) if line.startswith("error   model: model directory"))
    assert lines[index + 1] == "        give a directory, a GGUF file or a Hugging Face model id"
