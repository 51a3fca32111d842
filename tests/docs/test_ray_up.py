"""docs/ray-up.yaml is valid for Ray, and its commands have valid flags."""

import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

SHELL = shutil.which("bash") or "/bin/sh"  # Ray runs them in bash
FILE = Path(__file__).parents[2] / "docs" / "ray-up.yaml"


def prepared() -> dict[str, Any]:
    """As `ray up` reads it, before it reaches for any host."""
    from ray.autoscaler._private.util import prepare_config

    config: dict[str, Any] = prepare_config(deepcopy(yaml.safe_load(FILE.read_text())))
    return {"cluster_synced_files": [], **config}  # `ray up` adds it before it validates


def test_ray_takes_it() -> None:
    """Ray's own schema finds nothing unknown, missing or of another type, and every host named is one of the nodes."""
    from ray.autoscaler._private.util import validate_config

    config = prepared()
    validate_config(config)
    written = yaml.safe_load(FILE.read_text())
    (kind,) = config["available_node_types"].values()
    assert kind["max_workers"] == config["max_workers"] == len(written["provider"]["worker_ips"])
    assert written.keys() <= config.keys()


def test_its_commands_are_ones_that_ray_has() -> None:
    """Each line is shell, and each `ray start` in it has flags that Ray knows, with values that it takes."""
    from ray.scripts.scripts import start

    written = yaml.safe_load(FILE.read_text())
    lines = [line for name, lines in written.items() if name.endswith("_commands") for line in lines]
    started = []
    for line in lines:
        assert subprocess.run([SHELL, "-n", "-c", line], capture_output=True, text=True).stderr == ""
        if found := re.search(r"/bin/ray start (.*)", line):
            with start.make_context("start", found[1].replace("$RAY_HEAD_IP", "10.0.0.1").split()) as context:
                started.append(context.params)
    head, worker = started
    assert head["head"] and (head["num_cpus"], head["num_gpus"]) == (0, 0) and not worker["head"]
    assert worker["address"].rpartition(":")[2] == str(head["port"])
    assert head["autoscaling_config"] and worker["num_gpus"] is None


def test_redis_is_named_only_where_there_is_one() -> None:
    """Ray takes an empty address for a Redis that never answers, so that without one it must not be set at all."""
    (line,) = (line for line in yaml.safe_load(FILE.read_text())["head_start_ray_commands"] if " start " in line)
    asked = line.partition("/opt/coatcheck/bin/ray")[0] + "printenv RAY_REDIS_ADDRESS"
    said = [
        subprocess.run([SHELL, "-c", asked], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **redis})
        for redis in ({}, {"REDIS": "redis:6379"})
    ]
    assert [(one.returncode, one.stdout) for one in said] == [(1, ""), (0, "redis:6379\n")]
