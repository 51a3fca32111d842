"""tests/gpu/run.py with a second engine on the CPU in the GPU's place, and its processes with workers that go wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from tests.gpu.comparison import EXACT, Bounds, compare
from tests.gpu.outcome import Outcome
from tests.gpu.served import Answer, Served
from tests.gpu.workers import run_cases

RUN = Path(__file__).parent / "run.py"
# Reports each case as passed; "hang" hangs, "crash" ends the process, "lost" ends it after its report.
WORKER = """
import json, sys, time
for line in sys.stdin:
    case = line.strip()
    if case == "hang":
        time.sleep(600)
    if case == "crash":
        sys.exit(1)
    print(json.dumps(dict(case=case, result="passed", seconds=0.0, detail="")), flush=True)
    if case == "lost":
        sys.exit(3)
"""


def test_the_program_serves_one_model_of_each_part(tmp_path: Path) -> None:
    """Equal engines agree, what only GPUs do is skipped, and the JSON object has every case."""
    cases = "families: qwen3.5 auto,quantised: load int8 llama,architectures: gptj,adapters: llama,kernels: long"
    command = [sys.executable, str(RUN), "--device", "cpu", "--jobs", "1", "--out", str(tmp_path), "--json"]
    done = subprocess.run(
        [*command, "--only", cases], capture_output=True, text=True, timeout=MAX_PROGRAM_SECONDS, cwd="/"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = {outcome["case"]: outcome["result"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert results == {
        "families: qwen3.5 auto": "passed",
        "quantised: load int8 llama": results["quantised: load int8 llama"],  # skipped without the C kernels
        "architectures: gptj": "passed",
        "adapters: llama": "skipped",
        "kernels: long": "skipped",
    }
    assert len(list((tmp_path / "logs").glob("*.log"))) == len(results)


def test_a_lost_worker_fails_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that hangs or ends is replaced, and later cases run. Cases past the end of the time are skipped."""
    monkeypatch.setattr("tests.gpu.workers.STARTUP_SECONDS", 5.0)
    cases = ["one", "hang", "two", "crash", "lost", "three"]
    seen: list[Outcome] = []
    outcomes = run_cases(
        [sys.executable, "-c", WORKER], cases, jobs=1, limit_of=lambda case: 1.0 if case == "hang" else 60.0,
        end=time.monotonic() + 600, on_outcome=seen.append,
    )  # fmt: skip
    assert outcomes == seen
    assert [(one.case, one.result) for one in outcomes] == [
        (case, "failed" if case in ("hang", "crash") else "passed") for case in cases
    ]
    late = run_cases(["false"], ["late"], jobs=2, limit_of=lambda case: 1.0, end=0.0, on_outcome=seen.append)
    assert [one.result for one in late] == ["skipped"]


def served(greedy: Answer, drawn: Answer, scores: float = -2.0) -> Served:
    return Served([greedy], [drawn], [scores] * 30, {})


@pytest.mark.parametrize(
    ("greedy", "drawn", "scores", "message"),
    [
        (([1, 2, 3], [-1.0, -1.0, -1.0]), ([1], [-1.0]), -2.0, None),
        (([1, 9, 9], [-1.0, -1.0001, -8.0]), ([1], [-1.0]), -2.0, None),
        (([1, 9, 3], [-1.0, -1.1, -1.0]), ([1], [-1.0]), -2.0, "greedy answer 0, token 1"),
        (([1, 2, 3], [-1.0, -1.0, -1.1]), ([1], [-1.0]), -2.0, "greedy answer 0, token 2"),
        (([1, 2, 3], [-1.0, float("nan"), -1.0]), ([1], [-1.0]), -2.0, "greedy answer 0, token 1"),
        (([1, 2], [-1.0, -1.0]), ([1], [-1.0]), -2.0, "has 2 of 3 tokens"),
        (([1, 2, 3], [-1.0, -1.0, -1.0]), ([7], [-5.0]), -2.0, "1 of 1 drawn answers differ"),
        (([1, 2, 3], [-1.0, -1.0, -1.0]), ([1], [-1.0]), -2.001, "prompts' log-probabilities"),
    ],
)
def test_answers_may_part_only_at_a_near_tie(greedy: Answer, drawn: Answer, scores: float, message: str | None) -> None:
    """A greedy token may differ where both log-probabilities are nearly equal; after it nothing is compared."""
    want = served(([1, 2, 3], [-1.0, -1.0, -1.0]), ([1], [-1.0]))
    bounds = Bounds(EXACT.most, EXACT.mean, parted=0)
    if message is None:
        compare(served(greedy, drawn, scores), want, bounds)
        return
    with pytest.raises(AssertionError, match=message):
        compare(served(greedy, drawn, scores), want, bounds)
