"""Report: prints each outcome on stderr when it comes, and makes a table and a JSON object of all outcomes."""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
import triton

from coatcheck.kernels.native import native_status
from tests.gpu.outcome import Outcome

_RESULTS = ("passed", "failed", "refused", "skipped")


class Report:
    def __init__(self, cases: Sequence[str], device: torch.device) -> None:
        self._total = len(cases)
        self._outcomes: list[Outcome] = []
        self._began = time.monotonic()
        self._facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu kernels": native_status(),
            "versions": f"torch {torch.__version__}, triton {triton.__version__}, "
            f"transformers {transformers.__version__}",
        }

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self._outcomes if outcome.result == "failed"]

    def add_outcome(self, outcome: Outcome) -> None:
        """Print one line."""
        self._outcomes.append(outcome)
        place = f"{len(self._outcomes)}/{self._total}"
        what = " ".join(outcome.detail.split())[:200]
        line = (
            f"{self._seconds():5.0f} s {place:>8} {outcome.result} in {outcome.seconds:.0f} s: {outcome.case}: {what}"
        )
        print(line, file=sys.stderr, flush=True)

    def table(self) -> str:
        """The cases that failed, were refused or were skipped, with reasons; then counts for each part."""
        lines = [f"{name}: {value}" for name, value in self._facts.items()]
        for result in _RESULTS[1:]:
            found = sorted((one for one in self._outcomes if one.result == result), key=lambda one: one.case)
            lines += ["", f"{result}:"] if found else []
            lines += [f"  {one.case}: {' '.join(one.detail.split())[:300]}" for one in found]
        parts = list(dict.fromkeys(one.case.partition(": ")[0] for one in self._outcomes))
        counts = Counter[tuple[str, str]]((one.case.partition(": ")[0], one.result) for one in self._outcomes)
        lines += ["", "| part | " + " | ".join(_RESULTS) + " | process seconds |", "|---|" + "---|" * 5]
        for part in parts:
            seconds = sum(one.seconds for one in self._outcomes if one.case.startswith(f"{part}: "))
            lines.append(
                f"| {part} | " + " | ".join(str(counts[part, one]) for one in _RESULTS) + f" | {seconds:.0f} |"
            )
        lines.append(f"{self._total} cases in {self._seconds():.0f} s: {'FAILED' if self.failed else 'no failure'}")
        return "\n".join(lines)

    def to_json(self) -> str:
        facts: dict[str, Any] = {**self._facts, "seconds": round(self._seconds()), "failed": len(self.failed)}
        return json.dumps({**facts, "outcomes": [asdict(outcome) for outcome in self._outcomes]}, indent=1)

    def _seconds(self) -> float:
        return time.monotonic() - self._began
