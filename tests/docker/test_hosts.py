"""Hosts without Kubernetes: the compose file and the systemd units start commands that exist, with settings that are
accepted."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.serve_config import ServeConfig
from tests.programs.find import need_program

DOCKER = Path(__file__).parents[2] / "docker"
UNITS = sorted((DOCKER / "systemd").glob("*.service"))


def flags_of(command: list[str]) -> dict[str, str]:
    """--name=value as the setting's name and value."""
    pairs = [flag.removeprefix("--").split("=", 1) for flag in command]
    return {name.replace("-", "_"): value for name, value in pairs}


def test_compose_starts_a_server_that_the_ports_reach() -> None:
    """Its flags are settings of `serve`, with keys; the published ports are those where the router listens."""
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["coatcheck"]
    words = [re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", word) for word in service["command"]]
    assert words[:2] == ["coatcheck", "serve"] and words[2].startswith("${MODEL:?")
    config = ServeConfig.build({"model": "org/model", **flags_of(words[3:])})
    assert (config.grpc_host, config.http_host, config.groups, config.tp) == ("0.0.0.0", "0.0.0.0", 1, 1)
    published = {int(port.rpartition(":")[2]) for port in service["ports"]}
    assert published == {config.grpc_port, config.http_listen_port}
    mounts = {volume.rpartition("}:")[2].split(":")[0] for volume in service["volumes"] if "}" in volume}
    assert config.api_keys is not None and str(Path(config.api_keys).parent) in mounts
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{config.http_listen_port}/health"
    names = re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text())
    assert "GROUPS" not in names  # a variable of bash that cannot be set


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say once its programs exist."""
    for other in UNITS:  # what it wants and starts after
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        text = re.sub(r"/opt/coatcheck/bin/\w+", str(program), other.read_text())
        (tmp_path / other.name).write_text(text)
    command = [need_program("systemd-analyze"), "verify", "--man=no", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "coatcheck" in line]
    assert not ours


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_unit_starts_a_command_with_flags_that_it_has(unit: Path) -> None:
    """Each flag is in the command's --help."""
    (line,) = re.findall(r"^ExecStart=/opt/coatcheck/bin/(.*)$", unit.read_text(), flags=re.MULTILINE)
    program, subcommand, *flags = shlex.split(line)
    if program == "coatcheck":
        assert subcommand == "serve" and ServeConfig.model_fields.keys() > {"ray_address"}
        assert {flag for flag in flags if flag.startswith("--")} == {"--config", "--apply", "--ray-address"}
        return
    from ray.scripts.scripts import cli

    known = {name for option in cli.commands[subcommand].params for name in option.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known


def test_stopping_serve_does_not_stop_the_cluster() -> None:
    """`serve` drains and ends the cluster on SIGTERM; the unit kills it instead, as the chart's container does."""
    assert "\nKillSignal=SIGKILL\n" in (DOCKER / "systemd" / "coatcheck.service").read_text()
