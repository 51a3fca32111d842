"""What the images hold: the same tree, made here without a container engine, and a server that runs from it."""

import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.sources import source_files

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
_BUILD = "docker/install.sh"
_IMAGES = ("cuda", "rocm", "cpu")
_STAGES = ["dependencies", "build", "base", "gpu", *_IMAGES]


def dockerfile_stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by name."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    found = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in stages}
    assert list(found) == _STAGES
    return found


def sources() -> list[Path]:
    """What the build sees: files of the repository that the ignore file lets through, by its own rules."""
    rules = [line for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] != "#"]
    taken = []
    for name in map(str, source_files()):
        let_in = False
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            parts = (
                Path(name).parts
                if rule.startswith("**/")
                else ["/".join(Path(name).parts[:depth]) for depth in (1, 2, 3)]
            )
            if any(fnmatch.fnmatch(part, pattern) for part in parts):
                let_in = rule.startswith("!")
        if let_in:
            taken.append(Path(name))
    return taken


@pytest.fixture(scope="session")
def tree() -> Iterator[Path]:
    """PREFIX, made by the Dockerfile's own script from the Dockerfile's own files; others may read it."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        for file in sources():
            (scratch / "source" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, scratch / "source" / file)
        site = sysconfig.get_path("purelib")
        script, prefix = str(scratch / "source" / _BUILD), str(scratch / "prefix")
        for step in ("--dependencies", "--wheel", "--code"):
            command = ["sh", script, step, prefix, site]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
            assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(scratch / "source")
        # A root file system that nobody may write to.
        subprocess.run(["chmod", "-R", "a-w", str(scratch / "prefix")], check=True)
        yield scratch / "prefix"


def confined() -> list[str]:
    """What a command of somebody who may write nothing of the tree begins with: another user than root, or, where none
    but root may read this Python, root without its powers."""
    if os.getuid() != 0:
        return []
    powers = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # As a child, since setpriv itself may still start what its user may not.
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'], check=True)"
    may = subprocess.run([*nobody, sys.executable, "-c", again], capture_output=True).returncode == 0
    return nobody if may else powers


@pytest.mark.full  # forty seconds of a core for the C kernels
def test_the_tree_is_whole(tree: Path) -> None:
    """It has the command, the packages with their protos and native kernels, the demo's model, and no tests."""
    package = next(tree.glob("lib/python3*/site-packages/coatcheck"))
    there = {str(file.relative_to(package)) for file in package.rglob("*")}
    assert {"proto/stubs/coatcheck.proto", "py.typed", "router/openai/routes.py", "cluster/commands/serve.py"} <= there
    assert any(re.fullmatch(r"kernels/_native.*\.so", name) for name in there)
    assert not {"tests", "bench", "demo", "docker"} & {Path(name).parts[0] for name in there}
    assert (tree / "demo" / "model" / "config.json").is_file() and (tree / "bin" / "coatcheck").is_file()


@pytest.mark.full
@pytest.mark.ray
def test_a_server_runs_from_it(tree: Path) -> None:
    """For somebody who may write nothing of the tree it serves the demo's model and answers."""
    who = confined()
    assert subprocess.run([*who, "touch", str(tree / "written")], capture_output=True).returncode != 0
    home = Path(tempfile.mkdtemp())
    home.chmod(0o777)
    environment = {"PATH": f"{tree / 'bin'}:/usr/bin:/bin", "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"RAY_TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    flags = ["--grpc-port", "0", "--http-port", "none", "--kv-memory", "16MiB"]
    command = [*who, str(tree / "bin" / "coatcheck"), "serve", str(tree / "demo" / "model"), *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=home)
    try:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        assert lines and lines[-1].startswith("ready: "), lines
        address = lines[-1].split(" at ")[1].split(",")[0]
        asked = [*who, str(tree / "bin" / "coatcheck"), "generate", "def f(", "--max-tokens", "4", "--address", address]
        done = subprocess.run(
            asked, capture_output=True, text=True, env=environment, cwd=home, timeout=MAX_WAIT_SECONDS
        )
        assert done.returncode == 0, done.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(MAX_WAIT_SECONDS) == 0
    finally:
        server.kill()
        server.communicate()
        shutil.rmtree(home, ignore_errors=True)


def test_the_dockerfile_builds_what_is_tested() -> None:
    """Its stages run the script's steps, its base is pinned, both images end as a user who is not root."""
    stages = dockerfile_stages()
    assert f"sh {_BUILD} --dependencies /opt/coatcheck" in stages["dependencies"]
    assert f"sh {_BUILD} --wheel" in stages["build"]
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-\S+$", DOCKERFILE, flags=re.MULTILINE)
    for image in _IMAGES:
        assert re.search(r"^USER 1000:1000$", stages[image], flags=re.MULTILINE)
    # KubeRay's probes and its start command; the chart's readiness probe with mutual TLS.
    assert {"bash", "wget"} <= set(stages["base"].split())
    # NCCL loads them for InfiniBand and RoCE; without them it falls back to TCP and says nothing. Triton calls gcc.
    assert {"gcc", "libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(stages["gpu"].split())
    assert all(stages[image].startswith(f"gpu AS {image}") for image in ("cuda", "rocm"))
    version = re.search(r'^version = "(\S+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version and f"coatcheck:{version[1]}" in DOCKERFILE


def test_new_code_changes_one_small_layer() -> None:
    """The dependencies are installed from files that rarely change. The code comes after everything else."""
    stages = dockerfile_stages()
    copied = [line for line in stages["dependencies"].splitlines() if line.startswith("COPY")]
    assert copied == ["COPY pyproject.toml constraints.txt ./", "COPY docker/install.sh docker/"]
    assert "COPY --from=dependencies /opt/coatcheck /opt/coatcheck" in stages["base"]
    for image in _IMAGES:
        layers = [line for line in stages[image].splitlines() if line.startswith(("RUN", "COPY", "ADD"))]
        assert layers[-1].endswith(f"sh /source/{_BUILD} --code /opt/coatcheck") and "from=build" in layers[-1]
        assert not any(line.startswith(("COPY", "ADD")) for line in layers)


def requirements(folder: Path) -> tuple[list[str], list[str]]:
    """What the step of the dependencies asks pip for: the calls of pip, and the lines of requirements.txt."""
    (folder / "docker").mkdir()
    for file in (_BUILD, "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, folder / file)
    calls = folder / "calls"
    (folder / "python").write_text(
        "#!/bin/sh\n"
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit; fi\n'
        f'if [ "$2" = pip ]; then echo "$@" >>{calls}; exit; fi\nexec {sys.executable} "$@"\n'
    )
    (folder / "python").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), "TORCH": "torch==1+cpu"}
    environment["PYTHONPATH"] = str(folder / "more")
    command = ["sh", str(folder / _BUILD), "--dependencies", str(folder / "prefix")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines(), (folder / "prefix" / "requirements.txt").read_text().splitlines()


def test_requirements_are_those_of_the_project(tmp_path: Path) -> None:
    """The step of the dependencies asks pip for what pyproject.toml names, with the versions of constraints.txt."""
    (torch, others), asked = requirements(tmp_path)
    assert torch.endswith("install -c constraints.txt torch==1+cpu") and "-c constraints.txt -r" in others
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(asked) >= {*project["dependencies"], *project["optional-dependencies"]["node"]}


def test_the_triton_of_rocm_stays(tmp_path: Path) -> None:
    """PyTorch for ROCm brings Triton in a package of another name; PyPI's would write over its files."""
    package = tmp_path / "more" / "triton_rocm-3.7.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-rocm\nVersion: 3.7.1\n")
    (package / "top_level.txt").write_text("triton\n")
    _, asked = requirements(tmp_path)
    assert not any(line.startswith("triton") for line in asked) and any(line.startswith("torch>=") for line in asked)


def test_the_image_agrees_with_the_chart() -> None:
    """The chart's Ray is the image's, and its model in the image is where the script puts it."""
    values = (ROOT / "helm" / "coatcheck" / "values.yaml").read_text()
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned and f"version: {pinned[1]}" in values
    assert "/opt/coatcheck/demo/model" in (ROOT / "helm" / "coatcheck" / "values" / "cpu.yaml").read_text()
