"""Every command block of the PAGES runs as written, or is listed here with a reason."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coatcheck.router.text.tokenizer import TokenizerJson
from tests.docs.command_blocks import Command, code_blocks, shows
from tests.docs.own_network import OwnNetwork
from tests.docs.page_session import ROOT, PageSession
from tests.helm.chart import helm

PAGES = ("README.md", "docs/quickstart.md", "docs/memory.md")
USUAL_PORTS = (50051, 8000)


@dataclass(frozen=True)
class NotRun:
    """Why a command is not run here. `instead`: shell that has its effect on the commands after it."""

    why: str
    instead: str = ""


_MINUTES = NotRun("measures for minutes on a machine that has nothing else to do")
_OWN_MODEL = NotRun("MODEL stands for the reader's own; other commands of the pages do the same with demo/model")
_GPUS = NotRun("needs a host with several GPUs")
_KUBERNETES = NotRun("needs a Kubernetes cluster with the KubeRay operator; the chart is rendered below")

NOT_RUN: dict[str, dict[str, NotRun]] = {
    "README.md": {
        "make demo": NotRun("starts a second cluster; its target and its script's path are checked below"),
        "make test": NotRun("is what runs this test"),
        "pip install -c constraints.txt torch && pip install -c constraints.txt .": NotRun(
            "installs several GB; tests/docker makes and uses such an installation"
        ),
        "coatcheck plan MODEL": _OWN_MODEL,
        "coatcheck serve MODEL": _OWN_MODEL,
        "coatcheck serve MODEL --tp 2": _GPUS,
        "coatcheck serve MODEL --groups 2": _GPUS,
        "coatcheck serve MODEL --groups 2 --tp 4": _GPUS,
        "docker build -f docker/Dockerfile --target cpu -t coatcheck:0.1.0 .": NotRun(
            "needs a container engine; tests/docker makes the same files without one"
        ),
        "helm install llm helm/coatcheck -f helm/coatcheck/values/cpu.yaml": _KUBERNETES,
        "helm test llm": _KUBERNETES,
        ".venv/bin/python bench/engine.py --json bench/results/engine.json": _MINUTES,
        "coatcheck doctor": NotRun(
            "1 if a port is taken on this machine", instead="coatcheck doctor > /dev/null || [ $? = 1 ]"
        ),
        ".venv/bin/python bench/serve.py --vllm PATH --json bench/results/serve.json": _MINUTES,
        ".venv/bin/python bench/router_cases/protocols.py": _MINUTES,
        ".venv/bin/python bench/engine_cases/long_prompt.py": _MINUTES,
    },
    "docs/quickstart.md": {
        "python3 -m venv env && . env/bin/activate": NotRun("makes an environment", instead=". env/bin/activate"),
        "pip install -c constraints.txt torch && pip install -c constraints.txt .": NotRun("installs 2.8 GB"),
    },
    "docs/memory.md": {},
}


def commands_of(page: str) -> list[Command]:
    return [command for block in code_blocks((ROOT / page).read_text()) for command in block.commands()]


def inline_commands() -> set[str]:
    """The commands in the text of the pages, such as `make test-all`."""
    text = "\n".join((ROOT / page).read_text() for page in (*PAGES, "bench/README.md"))
    return set(re.findall(r"`((?:make|sh|python|bench/)[^`\n]+)`", text))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_commands(page: str) -> None:
    """Every block of a page is of a kind that the test runs: sh, console, python or indented."""
    assert {block.language for block in code_blocks((ROOT / page).read_text())} <= {"sh", "console", "python", ""}


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_still_there(page: str) -> None:
    """Every command in the list of those that are not run is still on the page."""
    assert set(NOT_RUN[page]) <= {command.text for command in commands_of(page)}


@pytest.mark.parametrize("page", ["README.md", "docs/memory.md", "docs/operations.md"])
def test_prompts_that_show_the_cache_are_longer_than_blocks(page: str) -> None:
    """A prompt that a page explains or retains has more than 100 tokens of the demo model, so that it fills blocks: a
    prompt below 32 tokens would show little of the cache, and one below 16 nothing."""
    tokenizer = TokenizerJson.load(str(ROOT / "demo" / "model"))
    commands = [command.text for command in commands_of(page)]
    exports = "\n".join(text for text in commands if text.startswith("export PROMPT="))
    shown = [text for text in commands if text.startswith("coatcheck explain ") or " --retain " in text]
    assert shown
    for text in shown:
        script = f'coatcheck() {{ printf %s "$2"; }}\n{exports}\n{text}'
        prompt = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert len(tokenizer.encode(prompt)) > 100, text


def test_make_targets_exist() -> None:
    """`make` knows each target that the pages name."""
    named = {*(command.text for page in PAGES for command in commands_of(page)), *inline_commands()}
    targets = {text.split()[1] for text in named if text.startswith("make ")}
    assert {"demo", "test", "test-all", "test-floor", "bench"} <= targets
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_scripts_exist_with_their_flags() -> None:
    """Each script that the pages have the reader run is there, and knows the flags that it is given."""
    named = {*(command.text for page in PAGES for command in commands_of(page)), *inline_commands()}
    checked = 0
    for text in named:
        if found := re.match(r"(?:\S*python |sh )?((?:bench|docs|proto|docker)/\S+\.(?:py|sh))(.*)", text):
            script = (ROOT / found[1]).read_text()
            assert all(flag in script for flag in re.findall(r"--[\w-]+", found[2])), text
            checked += 1
    assert checked >= 8


def test_the_chart_is_one_that_helm_takes() -> None:
    """`helm install` as written would render, and `helm test` would find a pod to run."""
    (install,) = (text for text in NOT_RUN["README.md"] if text.startswith("helm install "))
    _, _, release, *rest = install.split()
    words = [str(ROOT / word) if word.startswith("helm/") else word for word in rest]
    done = helm("template", release, *words)
    assert done.returncode == 0, done.stderr
    assert 'helm.sh/hook": test' in done.stdout or "helm.sh/hook: test" in done.stdout


@pytest.fixture
def network() -> Iterator[OwnNetwork]:
    with OwnNetwork() as network:
        if network.reason and any(_is_taken(port) for port in USUAL_PORTS):
            pytest.skip(f"a port of {USUAL_PORTS} is in use, and {network.reason}")
        yield network


def _is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


@pytest.mark.ray
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, network: OwnNetwork, tmp_path: Path) -> None:
    """Typed in order, the page's commands exit with 0 and print what the page shows; Ctrl-C ends `serve` with 0."""
    missing: set[str] = set()
    with PageSession(network, tmp_path / "checkout") as session:
        for command in commands_of(page):
            if (left_out := NOT_RUN[page].get(command.text)) is not None:
                if left_out.instead:
                    session.assume(left_out.instead)
                continue
            program = command.text.split()[0]
            if program == "curl" and shutil.which("curl") is None:
                missing.add(program)
                continue
            done = session.type(command.text)
            assert done.returncode == 0, f"{page}: {command.text}\n{done.stdout}\n{done.stderr}"
            if command.output is not None:
                assert shows(command.output, done.stdout), f"{page}: {command.text} prints\n{done.stdout}"
            if program == "curl":
                # An object's key: the model may sample the token "error".
                assert '"error":' not in done.stdout, done.stdout
        assert session.interrupt_server() == 0
    if missing:
        pytest.skip(f"all but the commands of {', '.join(missing)} ran: not installed")
