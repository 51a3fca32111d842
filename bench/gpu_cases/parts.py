"""The command line of bench/gpu.py: runs the parts one after another.

On a GPU each part runs in a process of its own, because after a fault in a kernel every later call on the device fails
in that process. A part that takes longer than its limit is killed. The table on disk has every row as it came, and
which parts have begun and ended, so another run continues it with --resume.
"""

import argparse
import gc
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import triton  # type: ignore[import-untyped]

from coatcheck.bench.gpu_cases import all_reduce as gpu_all_reduce
from coatcheck.bench.gpu_cases import attention as gpu_attention
from coatcheck.bench.gpu_cases import engine as gpu_engine
from coatcheck.bench.gpu_cases import experts as gpu_experts
from coatcheck.bench.gpu_cases import latents as gpu_latents
from coatcheck.bench.gpu_cases import linears as gpu_linears
from coatcheck.bench.gpu_cases import ranks as gpu_ranks
from coatcheck.bench.gpu_cases import recurrent as gpu_recurrent
from coatcheck.bench.gpu_cases import rows as gpu_rows
from coatcheck.bench.gpu_cases import steps as gpu_steps
from coatcheck.bench.gpu_cases import tune as gpu_tune
from coatcheck.bench.gpu_cases.clock import Roofs, is_usable, measure_roofs
from coatcheck.bench.gpu_cases.table import Measurement, Table

Part = Callable[..., Iterator[Measurement]]
# The most important parts come first, in case time runs out.
PARTS: dict[str, Part] = {
    "correct": gpu_attention.correct,
    "decode": gpu_attention.decode,
    "prefill": gpu_attention.prefill,
    "behind": gpu_attention.behind,
    "rows": gpu_rows.rows,
    "sampling": gpu_rows.sampling,
    "engine": gpu_engine.engine,
    "steps": gpu_steps.steps,
    "linears": gpu_linears.linears,
    "w8a8": gpu_linears.w8a8,
    "adapters": gpu_linears.adapters,
    "experts": gpu_experts.experts,
    "latents": gpu_latents.latents,
    "delta": gpu_recurrent.delta,
    "mamba": gpu_recurrent.mamba,
    "tiers": gpu_ranks.tiers,
    "all_reduce": gpu_all_reduce.all_reduce,
    "ranks": gpu_ranks.ranks,
    "deterministic": gpu_engine.deterministic,
    "flex": gpu_attention.flex,
    "tune": gpu_tune.tune,
}
# Seconds after which a part's process is killed. The four calls of bench/gpu.py take less than nine minutes each.
LIMITS = {
    "correct": 150, "decode": 120, "prefill": 120, "behind": 100,
    "rows": 80, "sampling": 80, "engine": 200, "steps": 150,
    "linears": 90, "w8a8": 70, "adapters": 60, "experts": 90, "latents": 70, "delta": 70, "mamba": 90,
    "tiers": 80, "all_reduce": 60, "ranks": 150, "deterministic": 120, "flex": 120, "tune": 480,
}  # fmt: skip
# Run only if --only names them: they have no targets.
ASKED_FOR = {"tune"}
DEVICE_LOST = 3  # the exit code of a child whose device is unusable


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a part failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="bench/gpu.py")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where gpu.json and gpu.md go")
    parser.add_argument("--only", default="", help=f"parts, with commas between: {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes, whose times mean nothing")
    parser.add_argument("--minutes", type=float, default=7.5, help="no part begins later than this")
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--as-peer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows in --out; run the parts that have not begun"
    )
    options = parser.parse_args(arguments)
    if options.as_rank:
        gpu_ranks.as_rank(options.as_rank)
        return 0
    if options.as_peer:
        gpu_all_reduce.as_peer(options.as_peer)
        return 0
    wanted = [name for name in options.only.split(",") if name] or [name for name in PARTS if name not in ASKED_FOR]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "this host has no usable GPU; --device cpu --quick tries the script itself\n")
    if options.device == "cuda" and not options.child:
        own = [argument for argument in arguments if argument != "--resume"]
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu.py"), *own, "--child"]
        return run_in_children(
            command, wanted, options.out, limits=LIMITS, minutes=options.minutes, resume=options.resume
        )
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    roofs = measure_roofs(device, quick=options.quick)
    table = Table.resumed(options.out) if options.resume else Table(options.out, facts(device, roofs, options.quick))
    table.print_head()
    for name in wanted:
        run_part(name, table, device, roofs, quick=options.quick, minutes=options.minutes)
        if device.type == "cuda" and not is_usable(device):
            return DEVICE_LOST
    table.facts["seconds"] = round(table.seconds)
    table.save()
    return int(table.failed)


def run_in_children(
    command: Sequence[str],
    parts: Sequence[str],
    directory: Path,
    *,
    limits: Mapping[str, float],
    minutes: float = 60,
    resume: bool = False,
) -> int:
    """Run each part as `command` with --only, for up to `limits[part]` seconds. Return the exit code of the whole run.

    `minutes`: no part begins later. `resume`: keep the rows that `directory` has, and leave out the parts that it says
    have begun.
    """
    saved = directory / "gpu.json"
    if not resume:
        saved.unlink(missing_ok=True)  # another run's
    started, exit_code = time.monotonic(), 0
    for part in parts:
        states = Table.resumed(directory).facts.get("parts", {}) if saved.exists() else {}
        if part in states:
            continue
        if time.monotonic() - started > 60 * minutes:
            print(f"{part} is not begun: {minutes} minutes are over; continue with --resume", flush=True)
            return 1
        code = _run_for([*command, "--only", part, *(["--resume"] if saved.exists() else [])], limits[part])
        if not saved.exists():
            return 1 if code is None else code
        table = Table.resumed(directory)
        if table.facts.get("parts", {}).get(part, "begun") == "begun":
            why = f"ended with exit code {code}" if code is not None else f"was killed after {limits[part]:g} s"
            table.begin_part(part)
            table.add(Measurement(part, "the rest of it", failure=f"its process {why}"))
        exit_code = int(table.failed)
    return exit_code


def _run_for(command: Sequence[str], limit: float) -> int | None:
    """The exit code of `command`; None if it was killed after `limit` seconds, with its children."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_part(
    name: str, table: Table, device: torch.device, roofs: Roofs, *, quick: bool, minutes: float
) -> None:  # fmt: skip
    """Add the rows of a part to the table. An exception becomes a FAILED row after them."""
    began = table.seconds
    if began > 60 * minutes:
        table.add(Measurement(name, "not begun", note=f"{minutes} minutes were over"))
        return
    table.begin_part(name)
    try:
        with torch.no_grad():  # not inference mode: the copier's thread writes to tensors that are made here
            for row in PARTS[name](device, roofs, quick=quick):
                table.add(row)
                if table.seconds > 60 * (minutes + 1):
                    table.add(Measurement(name, "the rest of it", note="time was over"))
                    break
    except Exception:  # the other parts still run
        table.add(Measurement(name, "the rest of it", failure=traceback.format_exc()))
    table.end_part(name, table.seconds - began)
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # the caller checks the device
            torch.cuda.empty_cache()


def facts(device: torch.device, roofs: Roofs, quick: bool) -> dict[str, Any]:
    """The device and the versions of a run, without host name and paths."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": f"python {platform.python_version()}, {versions}",
        "copy": f"{roofs.copy / 1e9:.0f} GB/s read and written",
        "read": f"{roofs.read / 1e9:.0f} GB/s read; shares of memory are of the larger of copy and read",
        "matrix": f"{roofs.matrix / 1e12:.1f} TFLOP/s of bfloat16",
        "quick": quick,
    }
