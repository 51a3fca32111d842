"""The examples in the docstrings and in the documentation of the Python front door run as they stand."""

import asyncio
import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import coatcheck
from coatcheck.cluster.client import async_client, client, llm
from tests.cluster.fake_router import FakeRouter

DEMO = str(Path(__file__).parents[3] / "demo" / "model")
PAGE = Path(__file__).parents[3] / "docs" / "python.md"
ADDRESS, MODEL = "127.0.0.1:50051", "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def load_once() -> Callable[..., coatcheck.LLM]:
    """LLM's constructor, which loads a model once for all examples."""
    return functools.cache(coatcheck.LLM)


@pytest.fixture(autouse=True)
def shared_model(load_once: Callable[..., coatcheck.LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples' `LLM(...)` is `load_once`."""
    monkeypatch.setattr(llm, "LLM", load_once)
    monkeypatch.setattr(coatcheck, "LLM", load_once, raising=False)


def example(module: ModuleType) -> str:
    """The indented block of the module's docstring."""
    lines = (module.__doc__ or "").splitlines()
    block = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    return f"import asyncio\nimport coatcheck\nfrom coatcheck import LLM, AsyncClient, Client\n{block}"


@pytest.mark.parametrize("module", [coatcheck, client, llm], ids=lambda module: module.__name__)
async def test_example_runs(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of each module runs against a router, or with the demo model, and prints text."""
    async with FakeRouter() as router:
        program = example(module).replace(ADDRESS, router.address).replace(MODEL, DEMO)
        await asyncio.to_thread(exec, compile(program, module.__name__, "exec"), {})
    assert capsys.readouterr().out.strip()


async def test_example_with_coroutines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of AsyncClient runs inside a coroutine and prints text."""
    async with FakeRouter() as router:
        body = textwrap.indent(example(async_client).replace(ADDRESS, router.address), "    ")
        scope: dict[str, object] = {}
        exec(compile(f"async def run():\n{body}\n", "example", "exec"), scope)
        await scope["run"]()  # type: ignore[operator]
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", range(3))
async def test_page_runs(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each Python block of docs/python.md runs as a program of its own and prints text."""
    program = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[block]
    async with FakeRouter() as router:
        program = program.replace(ADDRESS, router.address).replace('"demo/model"', repr(DEMO))
        await asyncio.to_thread(exec, compile(program, "docs/python.md", "exec"), {})
    assert capsys.readouterr().out.strip()
