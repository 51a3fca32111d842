"""Runs the parts of bench/gpu.py in child processes, so that a part that crashes or loses the device costs no other.

After a fault in a kernel every later call on the device fails in that process. A child records in the table which parts
it has begun and ended. If it ends early, the next child runs the parts that have not begun.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from coatcheck.bench.gpu_cases.table import Measurement, Table

DEVICE_LOST = 3  # the exit code of a child whose device is unusable
_GOOD = (0, 1, 2)


def run_in_children(command: Sequence[str], parts: Sequence[str], directory: Path) -> int:
    """Return the exit code of the whole run. A child is `command` with --only, and with --resume after the first."""
    resume: list[str] = []
    left = list(parts)
    (directory / "gpu.json").unlink(missing_ok=True)  # another run's
    while True:
        code = subprocess.run([*command, "--only", ",".join(left), *resume]).returncode
        if code in _GOOD or not (directory / "gpu.json").exists():
            return code
        table = Table.resumed(directory)
        states: dict[str, str] = table.facts.get("parts", {})
        for part, state in states.items():
            if state == "begun" and part in left:
                table.add(Measurement(part, "the rest of it", failure=f"its process ended with exit code {code}"))
        fewer = [part for part in left if part not in states]
        if not fewer or len(fewer) == len(left):
            return 1
        left, resume = fewer, ["--resume"]
