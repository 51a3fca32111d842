"""The parts of bench/gpu.py in a process of their own, so that one which loses the device or dies costs no other part.

An error of a kernel leaves every later call on the device failing, in that process alone. A child says in the table
which parts it has begun and ended; if it ends before its time, another takes up what it had not begun. Not known here:
what a part is, nor torch.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from coatcheck.bench.gpu_cases.table import Measurement, Table

DEVICE_LOST = 3  # the exit code of a child whose device answers no more
_GOOD = (0, 1, 2)


def run_in_children(command: Sequence[str], parts: Sequence[str], directory: Path) -> int:
    """The exit code of all together. `command` with --only and, from the second on, --resume is a child."""
    resume: list[str] = []
    left = list(parts)
    (directory / "gpu.json").unlink(missing_ok=True)  # another run's
    while True:
        code = subprocess.run([*command, "--only", ",".join(left), *resume]).returncode
        if code in _GOOD or not (directory / "gpu.json").exists():
            return code
        table = Table.resumed(directory)
        said: dict[str, str] = table.facts.get("parts", {})
        for part, state in said.items():
            if state == "begun" and part in left:
                table.add(Measurement(part, "the rest of it", failure=f"its process ended with exit code {code}"))
        fewer = [part for part in left if part not in said]
        if not fewer or len(fewer) == len(left):
            return 1
        left, resume = fewer, ["--resume"]
