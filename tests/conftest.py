"""What every test shares: hypothesis without deadlines, limits for hangs, a Ray folder for each worker, and what a run
reports: its progress, seconds per folder and outcomes."""

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.unraisableexception import collect_unraisable  # public nowhere
from hypothesis import settings

from tests.outcomes import Outcomes
from tests.progress import ProgressFile, folder_of

# Tests pass settings to each Ray that they start. A token or an address from the environment would reach Ray too.
for name in list(os.environ):
    if name.startswith("RAY_") and name != "RAY_TMPDIR":
        del os.environ[name]

# gRPC's core reads this when it is imported. By default it logs each server that ends with an open call, and many do
# here. Processes that tests start do not inherit the variable, because tests check their output.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GRPC_VERBOSITY", os.environ.get("GRPC_VERBOSITY", "ERROR"))
    import grpc  # noqa: F401

# Two busy cores make single examples slow at random; the per-test timeout still bounds the whole.
settings.register_profile("coatcheck", deadline=None)
settings.load_profile("coatcheck")

# If several processes run tests side by side, only the controller reports.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# `make test` sets the folder for the reports of a run (TEST_OUTCOMES) and the name of the run (TEST_PART).
_REPORTS = Path(os.environ["TEST_OUTCOMES"]) if "TEST_OUTCOMES" in os.environ and not _IS_WORKER else None

_seconds: dict[str, float] = {}
_tests: Counter[str] = Counter()
_outcomes = Outcomes()
_progress = ProgressFile(_REPORTS / f"progress-{os.environ['TEST_PART']}.json") if _REPORTS else None


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes that run tests a folder for its Rays, which would share /tmp/ray. The path is
    short because it contains sockets."""
    if _IS_WORKER:
        os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the tests that start Ray need not import the other files, which takes each worker 15 s."""
    if str(config.option.markexpr).startswith("ray") and collection_path.name.startswith("test_"):
        return "mark.ray" not in collection_path.read_text() or None
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    if _progress and session.items:
        _progress.set_tests(item.nodeid for item in session.items)
    gc.freeze()  # the collections after tests leave out what was imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    """The controller itself collects nothing; every worker collects the same tests."""
    if _progress and not _tests:
        _progress.set_tests(ids)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`Serving` refuses to start a Ray for a test that is not marked."""
    os.environ["TEST_MAY_START_RAY"] = "1" if item.get_closest_marker("ray") else "0"


# Files with the most seconds. The processes that run tests side by side begin with these, in this order: one that began
# late would end long after all others.
SLOW_FILES = (
    "kernels/triton/test_triton_interpreted.py",
    "workers/runner/test_simulated_gpu.py",
    "router/event_loop/test_hostile_bodies.py",
    "cluster/local/test_no_ray.py",
    "workers/model/test_token_shards.py",
    "router/clients/test_other_clients.py",
    "workers/model/test_w8a8_models.py",
    "cluster/commands/test_verify.py",
    "kernels/triton/test_triton_compiles.py",
    "chaos/test_kills.py",
    "docs/test_commands.py",
    "system/test_secure_serve.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _IS_WORKER:
        places = {file: place for place, file in enumerate(SLOW_FILES)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collect the test's garbage before the next test begins: pytest reports a warning from a finalizer (an unclosed
    socket, a coroutine that was never awaited) with the test that runs when the finalizer does."""
    try:
        yield
    finally:
        # The traceback of a test that failed keeps its local variables.
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        # Later collections leave out what survives the tests of a file: modules and caches. Without this and the freeze
        # after the imports, a collection takes 16 ms instead of 3.
        if nextitem is None or nextitem.path != item.path:
            gc.freeze()
        collect_unraisable(item.config)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = folder_of(report.nodeid)
    _seconds[folder] = _seconds.get(folder, 0.0) + report.duration
    _tests[folder] += report.when == "call"
    _outcomes.add(report)
    if _progress:
        _progress.add(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds per folder")
    for folder, seconds in sorted(_seconds.items()):
        terminalreporter.write_line(f"{folder:>10}  {seconds:7.1f} s  {_tests[folder]:5d} tests")
    if _progress and _REPORTS:
        _progress.save()
        _outcomes.save(_REPORTS / f"outcomes-{os.environ['TEST_PART']}.json")
    terminalreporter.section("outcomes")
    for line in _outcomes.lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer and a chat template, for the tests of whole clusters."""
    # Imported late: torch and transformers take seconds, and most tests do without.
    from tests.router.tiny_tokenizer import write_model
    from tests.workers.checkpoints import tiny_checkpoint

    return write_model(tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), vocab_size=600))
