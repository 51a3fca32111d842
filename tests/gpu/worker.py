"""A process that runs cases: reads the name of a case from stdin, and writes its outcome to stdout as a line of JSON.

Whatever the case prints goes to a log of its own. After a fault of a kernel every later call on the device fails in
this process, so it ends, and its parent starts another.
"""

import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from coatcheck.bench.gpu_cases.clock import is_usable
from tests.gpu.outcome import Outcome, Refused, Skipped
from tests.gpu.parts import run_case

DEVICE_LOST = 3


def serve_cases(device: torch.device, logs: Path) -> int:
    """Return the exit code when stdin ends."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = line.strip()
        with log_of(case, logs).open("w") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
            outcome = _run(case, device)
            print(outcome.result, outcome.detail)
            sys.stdout.flush()
            sys.stderr.flush()
        print(outcome.to_json(), file=reports)
        if device.type == "cuda" and not is_usable(device):
            return DEVICE_LOST
    return 0


def log_of(case: str, logs: Path) -> Path:
    return logs / (re.sub(r"[^\w.-]+", "-", case) + ".log")


def _run(case: str, device: torch.device) -> Outcome:
    began = time.monotonic()

    def seconds() -> float:
        return round(time.monotonic() - began, 1)

    try:
        detail = run_case(case, device)
        return Outcome(case, "passed", seconds(), detail)
    except Refused as reason:
        return Outcome(case, "refused", seconds(), str(reason))
    except Skipped as reason:
        return Outcome(case, "skipped", seconds(), str(reason))
    except Exception as error:
        traceback.print_exc()
        return Outcome(case, "failed", seconds(), f"{type(error).__name__}: {error}"[:2000])
