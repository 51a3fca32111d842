"""The preStop hook of a router pod, run by a shell: when it drains, with which key, and that a failure is seen."""

import os
import subprocess
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.helm.chart import render


@pytest.fixture
def hook(tmp_path: Path) -> list[str]:
    """The rendered command, with the container's files in `tmp_path`."""
    command: list[str] = render("eight-gpus").container("router")["lifecycle"]["preStop"]["exec"]["command"]
    (tmp_path / "admin").mkdir()
    (tmp_path / "admin" / "key").write_text("the-rotated-key")
    script = command[-1].replace("/etc/coatcheck-admin", str(tmp_path / "admin"))
    return [*command[:-1], script.replace("/proc/1/fd/2", str(tmp_path / "log"))]


def run(hook: list[str], tmp_path: Path, *, exits: int) -> int:
    """The hook's exit status, with commands that write what they were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    calls = tmp_path / "calls"
    (programs / "sleep").write_text(f'#!/bin/sh\necho "sleep $@" >>{calls}\n')
    said = 'echo "coatcheck $@ with $COATCHECK_API_KEY"'
    (programs / "coatcheck").write_text(f"#!/bin/sh\n{said} >>{calls}\necho why it failed >&2\nexit {exits}\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(hook, env={"PATH": path}, timeout=MAX_WAIT_SECONDS).returncode


def test_it_waits_then_drains_with_the_key_in_the_file(hook: list[str], tmp_path: Path) -> None:
    """Load balancers learn of the end before the drain begins. A key that was rotated since the start is used."""
    assert run(hook, tmp_path, exits=0) == 0
    drain = "coatcheck drain --address demo-coatcheck:50051 --timeout 600 with the-rotated-key"
    assert (tmp_path / "calls").read_text().splitlines() == ["sleep 10", drain]


def test_a_failed_drain_fails_the_hook(hook: list[str], tmp_path: Path) -> None:
    """The kubelet sees the exit status, and the container's log the reason."""
    assert run(hook, tmp_path, exits=1) == 1
    assert (tmp_path / "log").read_text() == "why it failed\n"


def test_the_pod_lives_as_long_as_its_hook_may_take() -> None:
    """The grace period holds the wait, the drain, and half a minute to end."""
    rendered = render("eight-gpus", "router.drainDelaySeconds=20", "router.drainSeconds=100")
    assert rendered.group("router")["template"]["spec"]["terminationGracePeriodSeconds"] == 150


def test_no_key_is_in_the_environment() -> None:
    """The environment of a container keeps the old key after a rotation."""
    for template in render("eight-gpus").templates:
        for container in template["spec"]["containers"]:
            assert "COATCHECK_API_KEY" not in {variable["name"] for variable in container.get("env", ())}
