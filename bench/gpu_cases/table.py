"""The table of bench/gpu.py: rows that are printed and saved as they come."""

import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

_HEAD = "| part | what | ms | share of roof | error | beside | times as fast | target | state |"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. `share`: the time at the roof over `ms`. `error`: difference from the reference, or 0 (equal) and 1.
    `beside`: what `ms` is compared with, which took `beside_ms`. `target`: a bound on `share`, `ratio` or `error`."""

    part: str
    what: str
    ms: float | None = None
    share: float | None = None
    error: float | None = None
    beside: str = ""
    beside_ms: float | None = None
    target: str = ""
    met: bool | None = None
    failure: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """`beside_ms` over `ms`: above 1, ours is faster."""
        return self.beside_ms / self.ms if self.ms and self.beside_ms else None

    @property
    def state(self) -> str:
        return "FAILED" if self.failure else {True: "met", False: "NOT MET", None: "-"}[self.met]

    def cells(self) -> list[str]:
        beside = "" if not self.beside else f"{self.beside} {_number(self.beside_ms)}"
        share = "" if self.share is None else f"{self.share:.0%}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        error = "" if self.error is None else f"{self.error:.2g}"
        state = self.state + (f" ({self.note})" if self.note else "")
        return [self.part, self.what, _number(self.ms), share, error, beside, ratio, self.target, state]


class Table:
    """Saved to `directory` after every row. `facts`: device, versions, and the states of the parts."""

    def __init__(self, directory: Path, facts: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.rows: list[Measurement] = []
        self.facts = facts
        self._directory = directory
        self._started = time.monotonic()

    @classmethod
    def resumed(cls, directory: Path) -> Self:
        """The table that another process has saved in `directory`."""
        saved = json.loads((directory / "gpu.json").read_text())
        self = cls(directory, saved["facts"])
        names = {field.name for field in fields(Measurement)}
        self.rows = [
            Measurement(**{name: value for name, value in row.items() if name in names}) for row in saved["rows"]
        ]
        self._started -= saved["seconds"]
        return self

    def print_head(self) -> None:
        head = _HEAD.translate({ord(c): "-" for c in _HEAD if c != "|"})
        print(json.dumps(self.facts), _HEAD, head, sep="\n", flush=True)

    def begin_part(self, part: str) -> None:
        """Record that the part has begun, in case its process dies."""
        self.facts.setdefault("parts", {})[part] = "begun"
        self.save()

    def end_part(self, part: str, seconds: float) -> None:
        """Record that the part has ended, so that no other process runs it."""
        self.facts["parts"][part] = f"{seconds:.1f} s"
        self.save()

    def add(self, row: Measurement) -> None:
        """Print the row and save the table."""
        self.rows.append(row)
        print("| " + " | ".join(row.cells()) + " |", flush=True)
        if row.failure:
            print(row.failure, flush=True)
        self.save()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the first process."""
        return time.monotonic() - self._started

    @property
    def failed(self) -> bool:
        return any(row.failure for row in self.rows)

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        rows = [asdict(row) | {"ratio": row.ratio, "state": row.state} for row in self.rows]
        content = {"facts": self.facts, "seconds": self.seconds, "rows": rows}
        written = self._directory / "gpu.json.new"
        written.write_text(json.dumps(content, indent=1) + "\n")
        written.replace(self._directory / "gpu.json")
        facts = "\n".join(f"- {name}: {value}" for name, value in self.facts.items())
        lines = [_HEAD, "|" + "---|" * len(self.rows[0].cells()) if self.rows else ""]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in self.rows]
        failures = "".join(
            f"\n{row.part}, {row.what}:\n\n```\n{row.failure}\n```\n" for row in self.rows if row.failure
        )
        (self._directory / "gpu.md").write_text(f"{facts}\n\n" + "\n".join(lines) + "\n" + failures)


def or_failure(part: str, what: str, rows: Iterator[Measurement]) -> Iterator[Measurement]:
    """`rows`. An exception becomes a FAILED row after them, so that the other cases of a part still run."""
    try:
        yield from rows
    except Exception:
        yield Measurement(part, what, failure=traceback.format_exc())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
