"""Runs the parts of `make test`; its last lines say what was skipped and whether all passed: `python -m tests.run`.

Arguments go to make, such as SAMPLE= for the full matrices. After a stage in which a part fails, no further stage runs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.outcomes import Outcomes

# Targets of the Makefile. Those of one stage run side by side.
STAGES = (("lint",), ("types", "tests-together"), ("tests-alone",))


def main(stages: tuple[tuple[str, ...], ...], arguments: list[str]) -> int:
    """Returns the exit code: 0 when every part passed."""
    # These variables are for the children of the outer make; a make that is started here must not read them.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        environment["TEST_OUTCOMES"] = folder
        for stage in stages:
            command = ["make", "--no-print-directory", *arguments]
            running = {part: subprocess.Popen([*command, part], env=environment) for part in stage}
            failed = [part for part, process in running.items() if process.wait() != 0]
            if failed:
                break
        outcomes = Outcomes()
        for file in sorted(Path(folder).glob("*.json")):
            outcomes.merge(Outcomes.load(file))
    print("\n".join(["", *outcomes.lines()]))
    parts = [part for stage in stages for part in stage]
    print(f"FAILED in: {', '.join(failed)}" if failed else f"All passed: {', '.join(parts)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(STAGES, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
