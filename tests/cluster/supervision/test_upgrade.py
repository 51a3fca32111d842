"""A rolling upgrade: groups of a new version beside routers of the old one, and the way back."""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from coatcheck import __version__
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import RayNodes
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving

ROOT = Path(__file__).parents[3]
_PACKAGES = ("proto", "kernels", "workers", "router", "cluster")


_EVOLUTION = (
    (
        "cluster/config/serve_config.py",
        r"(?m)^    deterministic: ",
        '    made_up: int = setting("Model", "", 7)\n\\g<0>',
    ),
    ("workers/core/group_config.py", r"(?m)^    deterministic: ", "    made_up: int = 7\n\\g<0>"),
    ("cluster/config/derived_config.py", r"(max_num_seqs=config\.max_num_seqs),", r"\1 + config.made_up - 7,"),
    ("workers/driver.py", r"(tp=spec\.tp),", r"\1 + config.made_up - 7,"),
)


class Installed:
    """A folder that comes first on the path of every process, and holds one version of coatcheck at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, version: str, contract: int = 0, *, changed: Sequence[tuple[str, str, str]] = ()) -> None:
        """Replace the installed version, as pip does: running processes keep the code that they have loaded. `changed`
        has (file, pattern, replacement); _EVOLUTION adds a setting and a field of GroupConfig, and uses both."""
        made = self.folder.with_name(f"coatcheck-{version}")
        made.mkdir()
        for package in _PACKAGES:
            shutil.copytree(ROOT / package, made / package, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
        _rewrite(ROOT / "__init__.py", made / "__init__.py", r'__version__ = "\S+"', f'__version__ = "{version}"')
        number = made / "proto" / "contract.py"
        _rewrite(number, number, r"CONTRACT: Final = \d+", f"CONTRACT: Final = {contract}")
        for file, pattern, text in changed:
            _rewrite(made / file, made / file, pattern, text)
        link = self.folder / "next"
        link.symlink_to(made)
        link.replace(self.folder / "coatcheck")


def _rewrite(source: Path, target: Path, pattern: str, text: str) -> None:
    text, count = re.subn(pattern, text, source.read_text())
    assert count == 1
    target.write_text(text)


@pytest.mark.ray
@pytest.mark.full  # a minute or two on two cores: seven starts of processes that import torch
def test_versions_mix_within_a_contract(tmp_path: Path, tiny_model: Path) -> None:
    """Groups of a new version with the same contract serve beside an old router, which is restarted last. A group of
    another contract is refused by the router, the other groups serve on, and installing the old contract again brings
    it back."""
    installed = Installed(tmp_path / "installed")
    installed.install("0.0.1")
    with RayNodes(tmp_path, head_cpus=2, environment={"PYTHONPATH": str(installed.folder)}) as nodes:
        flags = ["--groups", "2", "--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]

        def restart(*arguments: str) -> tuple[int, str, str]:
            flags = ["--ray-address", nodes.address, "--drain-seconds", "1"]
            done = coatcheck("restart", *arguments, *flags, environment=nodes.environment, seconds=4 * MAX_WAIT_SECONDS)
            return done.returncode, done.stdout, done.stderr

        command = [str(tiny_model), *flags, "--ray-address", nodes.address]
        with Serving(*command, environment=nodes.environment) as serving:
            serving.wait_ready()
            assert versions(serving) == ["0.0.1"] * 3
            installed.install("0.0.2", changed=_EVOLUTION)
            code, _, said = restart("group-0")
            assert code == 0, said
            until(lambda: versions(serving) == ["0.0.1", "0.0.2", "0.0.1"], "the status says which runs what")
            used = {serving.generate("def main", max_tokens=4).group for _ in range(8)}
            assert used <= {"group-0", "group-1"} and "group-0" in used
            code, out, said = restart("--routers")
            assert code == 0 and out.count("serves again") == 4, said
            until(lambda: versions(serving) == ["0.0.2"] * 3, "all are new")
            installed.install("0.0.3", contract=1, changed=_EVOLUTION)
            code, _, said = restart("group-0")
            assert code == 1 and "router-0 does not use group-0" in said
            assert "coatcheck 0.0.2 with contract 0" in said and "0.0.3 with contract 1" in said
            assert "install one version on every node" in said
            assert serving.generate("def main", max_tokens=4).group == "group-1"
            installed.install("0.0.4", changed=_EVOLUTION)
            code, _, said = restart("group-0")
            assert code == 0, said
            until(lambda: versions(serving) == ["0.0.2", "0.0.4", "0.0.2"], "the group is back")


@pytest.mark.ray
@pytest.mark.full  # a start of a cluster, and four of a router
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module' \(log: \S+\)"),
        ("import os; os.write(2, b'broken'); os._exit(3)", r"its process died \(log: \S+; its last lines: .*broken\)"),
    ],
    ids=["import", "crash"],
)
def test_a_router_that_cannot_start_is_an_error(tmp_path: Path, tiny_model: Path, broken: str, reason: str) -> None:
    """`coatcheck restart --routers` to a version whose router cannot start fails with the reason, and does not wait for
    ever. Another version is enough to bring the router back."""
    installed = Installed(tmp_path / "installed")
    installed.install("0.0.1")
    with RayNodes(tmp_path, head_cpus=2, environment={"PYTHONPATH": str(installed.folder)}) as nodes:
        flags = ["--groups", "2", "--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]
        command = [str(tiny_model), *flags, "--ray-address", nodes.address]
        with Serving(*command, environment=nodes.environment) as serving:
            serving.wait_ready()
            installed.install("0.0.2", changed=[("router/server.py", "(?m)^class Router:", f"{broken}\n\\g<0>")])
            flags = ["group-0", "--routers", "--ray-address", nodes.address, "--drain-seconds", "1"]
            done = coatcheck("restart", *flags, environment=nodes.environment, seconds=4 * MAX_WAIT_SECONDS)
            said = f"router-0 does not start again: {reason}; 3 starts in a row failed"
            assert done.returncode == 1 and re.search(said, done.stderr), done.stderr
            installed.install("0.0.3")
            # Its own version may be the broken one: it may have begun to start just before, and import the rest now.
            until(lambda: versions_if_served(serving)[1:] == ["0.0.2", "0.0.1"], "the router is back")


@pytest.mark.ray
@pytest.mark.full  # two starts for one refusal
def test_serve_refuses_a_supervisor_of_another_contract(tmp_path: Path, tiny_model: Path) -> None:
    """`serve` asks a supervisor that runs already for its contract. Another one is refused with both numbers, and the
    cluster serves on."""
    installed = Installed(tmp_path / "installed")
    installed.install("0.0.1", contract=1)
    with RayNodes(tmp_path, head_cpus=1, environment={"PYTHONPATH": str(installed.folder)}) as nodes:
        command = [str(tiny_model), "--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]
        command += ["--ray-address", nodes.address]
        with Serving(*command, environment=nodes.environment) as other:
            other.wait_ready()
            before = supervisors(nodes)
            done = coatcheck("serve", *command, environment={**nodes.environment, "PYTHONPATH": ""})
            assert done.returncode == 2 and "0.0.1 with contract 1" in done.stderr, done.stderr
            assert f"{__version__} with contract 0" in done.stderr
            assert len(before) == 1 and supervisors(nodes) == before
            assert versions(other) == ["0.0.1"] * 2


def supervisors(nodes: RayNodes) -> list[int]:
    """The process ids of the supervisors."""
    return [pid for pid, command in nodes.processes().items() if command.startswith("ray::Supervisor")]


def versions(serving: Serving) -> list[str]:
    """The version of the router, then of each group."""
    status = serving.status()
    return [status["version"], *(group.get("version", "") for group in status["groups"])]


def versions_if_served(serving: Serving) -> list[str]:
    """As `versions`; empty while no router serves."""
    with suppress(grpc.RpcError):
        return versions(serving)
    return []


def test_another_version_can_be_made(tmp_path: Path) -> None:
    """The patterns of _EVOLUTION each match in exactly one place."""
    Installed(tmp_path / "installed").install("0.0.1", changed=_EVOLUTION)


def test_the_version_is_one() -> None:
    """`coatcheck.__version__` is the version in pyproject.toml."""
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
