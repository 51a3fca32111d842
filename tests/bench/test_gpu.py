"""bench/gpu.py on a CPU with small shapes: it runs from a bare checkout, keeps its rows, and reports failed parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coatcheck.bench.gpu_cases.parts import main, run_in_children
from coatcheck.bench.gpu_cases.table import Measurement, Table
from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS, MAX_WAIT_SECONDS

ROOT = Path(__file__).parents[2]
# Packages that a GPU host need not have. The installed coatcheck is hidden too.
ABSENT = (
    "cryptography",
    "ray",
    "grpc",
    "google.protobuf",
    "llguidance",
    "pydantic",
    "fastapi",
    "typer",
    "rich",
    "prometheus_client",
)
_PROGRAM = """
import runpy, sys
for name in {absent}: sys.modules[name] = None
sys.path = [p for p in sys.path if "editable" not in p]
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + str(f)]
sys.argv = [{script!r}, *{arguments}]
runpy.run_path({script!r}, run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(absent=ABSENT, script=str(ROOT / "bench/gpu.py"), arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=MAX_PROGRAM_SECONDS,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_whole_script_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    """Without Ray, gRPC, protobuf or an installation, every part that one process runs ends with rows, none FAILED."""
    parts = (
        "correct", "decode", "prefill", "behind", "rows", "sampling", "engine", "steps", "tiers", "all_reduce",
        "deterministic", "linears", "w8a8", "adapters", "experts", "latents", "delta", "mamba",
    )  # fmt: skip
    done = run("--device", "cpu", "--quick", "--out", str(tmp_path), "--only", ",".join(parts))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["part"] for row in saved["rows"]} == set(parts)
    assert [row for row in saved["rows"] if row["state"] in ("FAILED", "NOT MET")] == []
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(saved["rows"]) + 1


@pytest.mark.full
def test_ranks_and_flex_run_too(tmp_path: Path) -> None:
    """Two ranks are two more processes of the same script; FlexAttention runs uncompiled."""
    done = run("--device", "cpu", "--quick", "--out", str(tmp_path), "--only", "ranks,flex")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_part_that_breaks_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A failure keeps its traceback in both files, makes the table failed, and leaves the rows before it."""
    table = Table(tmp_path, {"device": "none"})
    table.add(Measurement("one", "good", ms=2.0, beside="other", beside_ms=3.0, target="1.4 times as fast", met=True))
    assert not table.failed
    table.add(Measurement("two", "the rest of it", failure="Traceback: it broke"))
    table.add(Measurement("three", "short", share=0.5, target="share >= 80%", met=False))
    assert table.failed
    saved = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["state"] for row in saved] == ["met", "FAILED", "NOT MET"] and saved[0]["ratio"] == 1.5
    assert "Traceback: it broke" in (tmp_path / "gpu.md").read_text()


_CHILD = """
import os, signal, sys
from pathlib import Path
from coatcheck.bench.gpu_cases.table import Measurement, Table
directory, (only, *more) = Path(sys.argv[1]), sys.argv[3:]
table = Table.resumed(directory) if more == ["--resume"] else Table(directory, {"device": "none"})
for part in only.split(","):
    table.begin_part(part)
    table.add(Measurement(part, "before", ms=1.0))
    if part == "hangs":
        signal.pause()
    if part == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if part == "fails":
        table.add(Measurement(part, "the rest of it", failure="a kernel's fault"))
    table.end_part(part, 1.0)
    if part == "fails":
        sys.exit(3)
sys.exit(int(table.failed))
"""


def test_a_part_whose_process_dies_costs_no_other(tmp_path: Path) -> None:
    """A part that dies of a signal, hangs or loses the device is a row FAILED; the other parts have their rows."""
    (tmp_path / "gpu.json").write_text("another run's")
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    limits = dict.fromkeys(("one", "dies", "two", "fails", "three"), MAX_WAIT_SECONDS)
    parts = ["one", "dies", "two", "fails", "three"]
    assert run_in_children(command, parts, tmp_path, limits=limits) == 1
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["part"] for row in rows if row["what"] == "before"] == ["one", "dies", "two", "fails", "three"]
    failures = {row["part"]: row["failure"] for row in rows if row["state"] == "FAILED"}
    assert failures == {"dies": "its process ended with exit code -11", "fails": "a kernel's fault"}
    assert run_in_children(command, ["one", "two"], tmp_path, limits=limits) == 0
    assert run_in_children([sys.executable, "-c", "import sys; sys.exit(7)"], ["one"], tmp_path, limits=limits) == 7


def test_a_part_that_takes_too_long_is_killed_and_a_run_is_continued(tmp_path: Path) -> None:
    """After its limit a part's process is killed. --resume keeps all rows and runs the parts that have not begun."""
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    limits = {"one": MAX_WAIT_SECONDS, "hangs": 20.0, "two": MAX_WAIT_SECONDS}
    assert run_in_children(command, ["one", "hangs"], tmp_path, limits=limits) == 1
    assert run_in_children(command, ["one", "two"], tmp_path, limits=limits, minutes=0, resume=True) == 1
    assert run_in_children(command, ["one", "hangs", "two"], tmp_path, limits=limits, resume=True) == 1
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["part"] for row in rows if row["what"] == "before"] == ["one", "hangs", "two"]
    assert {row["part"]: row["failure"] for row in rows if row["failure"]} == {
        "hangs": "its process was killed after 20 s"
    }


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--only", "nonsense"), "nonsense"), (("--device", "cuda"), "--device cpu --quick")]
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    """An unknown part, or --device cuda without a GPU, ends at once with what to change."""
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == 2 and said in capsys.readouterr().err
