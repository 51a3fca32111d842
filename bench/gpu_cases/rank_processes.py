"""Runs the ranks of a group as processes of bench/gpu.py."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

WAIT_SECONDS = 120


def run_rank_processes(arguments: Sequence[Sequence[str]], environment: Mapping[str, str]) -> str:
    """Run one process of bench/gpu.py for each of `arguments`. Returns the last line that the first one prints.

    If a rank fails, the others wait for it: all are ended. Raises RuntimeError with what they printed.
    """
    script = str(Path(__file__).parents[1] / "gpu.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, *each],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        for each in arguments
    ]
    deadline = time.monotonic() + WAIT_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    printed = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(errors[-3000:] for _, errors in printed))
    return printed[0][0].splitlines()[-1]
