"""conftest.py: warnings of a test's garbage count for that test, and the last lines list the skipped tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW_FILES
from tests.outcomes import Outcomes
from tests.progress import Progress

HERE = Path(__file__).parent
_PYPROJECT = """
[tool.pytest.ini_options]
filterwarnings = ["error"]
markers = ["ray", "timeout"]
asyncio_default_fixture_loop_scope = "function"
"""
# The files of one pytest run. Each shows one behaviour of conftest.py.
_FILES = {
    "test_garbage.py": """
import gc

def test_leaves_garbage():
    kept = {"file": open(__file__)}
    kept["itself"] = kept

def test_neighbour():
    gc.collect()
""",
    "test_failure.py": """
def test_fails():
    kept = open(__file__)
    assert kept is None

def test_neighbour():
    pass
""",
    "test_processor.py": """
import pytest

needs_a_gpu = pytest.mark.skipif(True, reason="needs a GPU; run these on one, such as an H100")

@needs_a_gpu
def test_one(): ...

@needs_a_gpu
def test_two(): ...

def test_three(): ...
""",
    "test_noise.py": """
import asyncio
import os

import grpc
import pytest

@pytest.mark.asyncio
@pytest.mark.parametrize("times", range(30))
async def test_a_server_ends(times):
    begun = asyncio.Event()

    async def never(request, context):
        begun.set()
        await asyncio.Event().wait()

    methods = {"Call": grpc.unary_unary_rpc_method_handler(never)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/Service/Call")(b"")
        await begun.wait()
        await server.stop(None)
        with pytest.raises(grpc.RpcError):
            await call
    assert "GRPC_VERBOSITY" not in os.environ
""",
}


def run(folder: Path, files: dict[str, str], *flags: str, **variables: str) -> list[str]:
    """The lines of a pytest run over these files, with this repository's conftest.py, where warnings are errors."""
    for name, text in {
        "conftest.py": (HERE / "conftest.py").read_text(),
        "pyproject.toml": _PYPROJECT,
        **files,
    }.items():
        (folder / name).write_text(text)
    inherited = {name: os.environ[name] for name in os.environ if name not in ("TEST_OUTCOMES", "PYTEST_XDIST_WORKER")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(HERE.parent)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of one run over all _FILES, with a line for each test."""
    return run(tmp_path_factory.mktemp("run"), _FILES, "-rA", "-s")


def results(lines: list[str], file: str) -> dict[str, list[str]]:
    """The tests of a file by their result. A test can have several, such as FAILED, and ERROR at its teardown."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if match := re.match(rf"(PASSED|FAILED|ERROR) {file}::(\w+)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def test_garbage_is_reported_by_the_test_that_made_it(lines: list[str]) -> None:
    """An open file in a cycle is found at the end of its test, not while the next one runs."""
    assert results(lines, "test_garbage.py") == {
        "PASSED": ["test_leaves_garbage", "test_neighbour"], "ERROR": ["test_leaves_garbage"]
    }  # fmt: skip


def test_a_failure_does_not_fail_the_next_test(lines: list[str]) -> None:
    """A file that the traceback of a failed test keeps open is closed, and reported, with that test."""
    assert results(lines, "test_failure.py") == {
        "PASSED": ["test_neighbour"], "FAILED": ["test_fails"], "ERROR": ["test_fails"]
    }  # fmt: skip


def test_the_last_lines_say_what_this_machine_lacks(lines: list[str]) -> None:
    """The output says for each reason how many tests were skipped for it, and in which files."""
    place = next(index for index, line in enumerate(lines) if line.startswith("2 skipped: "))
    reason, where, counts = lines[place : place + 3]
    assert "needs a GPU" in reason and "run these on one" in reason
    assert where == "       2 in test_processor.py" and counts.endswith(" failed, 2 skipped")


def test_a_passing_run_has_no_noise(lines: list[str]) -> None:
    """A gRPC server that ends with an open call logs nothing, and GRPC_VERBOSITY is not set for child processes."""
    assert results(lines, "test_noise.py") == {"PASSED": ["test_a_server_ends"] * 30}
    core = re.compile(r"[IWE]\d{4} [\d:.]+ ")
    assert [line for line in lines if core.search(line)] == []


def test_tests_that_run_side_by_side_are_counted_once(tmp_path: Path) -> None:
    """The run saves the outcomes and the progress of two workers in one file each."""
    files = {f"test_{name}.py": f"def test_{name}(): pass" for name in ("one", "two")}
    run(tmp_path, files, "-n", "2", TEST_OUTCOMES=str(tmp_path), TEST_PART="part")
    assert Outcomes.load(tmp_path / "outcomes-part.json") == Outcomes(passed=2)
    (folder,) = Progress.load(tmp_path / "progress-part.json").folders.values()
    assert (folder.total, folder.ended) == (2, 2) and folder.seconds > 0


def test_slow_files_begin_first(tmp_path: Path) -> None:
    """A process among several runs the files that take longest before the others, and each of these files exists."""
    assert all((HERE / file).is_file() for file in SLOW_FILES)
    folder = tmp_path / "tests" / Path(SLOW_FILES[1]).parent
    folder.mkdir(parents=True)
    (folder / Path(SLOW_FILES[1]).name).write_text("def test_slow(): pass")
    flags = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "-v")
    lines = run(tmp_path, {"test_a.py": "def test_fast(): pass"}, *flags)
    assert [name for line in lines for name in re.findall(r"PASSED .*::(\w+)", line)] == ["test_slow", "test_fast"]
