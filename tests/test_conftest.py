"""conftest.py: warnings of a test's garbage count for that test, and the last lines list the skipped tests."""

import re
from pathlib import Path

import pytest

from tests.outcomes import Outcomes
from tests.progress import Progress

HERE = Path(__file__).parent


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with this repository's conftest.py, where warnings are errors."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    monkeypatch.delenv("TEST_OUTCOMES", raising=False)
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        filterwarnings = ["error"]
        markers = ["ray", "timeout"]
        asyncio_default_fixture_loop_scope = "function"
        """
    )
    return pytester


def test_garbage_is_reported_by_the_test_that_made_it(run: pytest.Pytester) -> None:
    """An open file in a cycle is found at the end of its test, not while the next one runs."""
    run.makepyfile(
        """
        import gc

        def test_leaves_garbage():
            kept = {"file": open(__file__)}
            kept["itself"] = kept

        def test_neighbour():
            gc.collect()
        """
    )
    result = run.runpytest_subprocess("-rA")
    result.stdout.fnmatch_lines(["ERROR *::test_leaves_garbage*"])
    result.stdout.fnmatch_lines(["PASSED *::test_neighbour"])
    result.assert_outcomes(passed=2, errors=1)


def test_a_failure_does_not_fail_the_next_test(run: pytest.Pytester) -> None:
    """A file that the traceback of a failed test keeps open is closed, and reported, with that test."""
    run.makepyfile(
        """
        def test_fails():
            kept = open(__file__)
            assert kept is None

        def test_neighbour():
            pass
        """
    )
    result = run.runpytest_subprocess("-rA")
    result.stdout.fnmatch_lines(["PASSED *::test_neighbour"])
    result.assert_outcomes(passed=1, failed=1, errors=1)


def test_the_last_lines_say_what_this_processor_lacks(run: pytest.Pytester) -> None:
    """Without AVX512-BF16 the last lines say how many tests were skipped for that reason, and in which files."""
    run.makepyfile(
        """
        import torch
        torch.cpu._is_avx512_bf16_supported = lambda: False
        from tests.kernels.processor import needs_avx512_bf16

        @needs_avx512_bf16
        def test_one(): ...

        @needs_avx512_bf16
        def test_two(): ...

        def test_three(): ...
        """
    )
    reason, where, counts = [line for line in run.runpytest_subprocess("-qq").outlines if line][-3:]
    assert reason.startswith("2 skipped: ") and "AVX512-BF16" in reason and "run these on one" in reason
    assert where.startswith("       2 in test_") and counts == "1 passed, 0 failed, 2 skipped"


def test_what_starts_ray_has_a_limit_of_its_own(run: pytest.Pytester) -> None:
    """A test marked ray may wait for several slow events; one that names its limit keeps that."""
    run.makepyfile(
        """
        import pytest

        @pytest.mark.ray
        def test_starts_ray(request):
            assert request.node.get_closest_marker("timeout").args == (1800,)

        @pytest.mark.ray
        @pytest.mark.timeout(7)
        def test_names_its_limit(request):
            assert request.node.get_closest_marker("timeout").args == (7,)

        def test_starts_none(request):
            assert request.node.get_closest_marker("timeout") is None
        """
    )
    run.runpytest_subprocess().assert_outcomes(passed=3)


def test_a_passing_run_has_no_noise(run: pytest.Pytester) -> None:
    """A gRPC server that ends with an open call logs nothing, and GRPC_VERBOSITY is not set for child processes."""
    run.makepyfile(
        """
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
        """
    )
    result = run.runpytest_subprocess("-s")
    result.assert_outcomes(passed=30)
    core = re.compile(r"[IWE]\d{4} [\d:.]+ ")
    assert [line for line in [*result.outlines, *result.errlines] if core.search(line)] == []


def test_tests_that_run_side_by_side_are_counted_once(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run saves the outcomes and the progress of two workers in one file each."""
    monkeypatch.setenv("TEST_OUTCOMES", str(tmp_path))
    monkeypatch.setenv("TEST_PART", "part")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    run.makepyfile(test_one="def test_one(): pass", test_two="def test_two(): pass")
    run.runpytest_subprocess("-n", "2").assert_outcomes(passed=2)
    assert Outcomes.load(tmp_path / "outcomes-part.json") == Outcomes(passed=2)
    (room,) = Progress.load(tmp_path / "progress-part.json").rooms.values()
    assert (room.total, room.ended) == (2, 2) and room.seconds > 0
