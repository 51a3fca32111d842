"""Exposition: metrics written as Prometheus' text, line by line.

The library's own way takes some ten times as long, which a cluster of many ranks would feel at every scrape. It does
not know what is measured.
"""

from collections.abc import Iterable
from typing import Final, Literal

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels(**pairs: str) -> str:
    """As they stand behind a name."""
    return "{" + ",".join([f'{name}="{text.translate(_ESCAPES)}"' for name, text in pairs.items()]) + "}"


class Exposition:
    """`add` family by family, then `text`. Numbers are written as Python writes them, which Prometheus reads."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        help: str,
        samples: Iterable[tuple[str, float]],
    ) -> None:
        """A metric with all its samples, each with its labels; a counter's name gets its ending here."""
        if kind == "counter":
            name += "_total"
        self._lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")
        self._lines += [f"{name}{where} {value}" for where, value in samples]

    def text(self) -> str:
        """The page."""
        return "\n".join(self._lines) + "\n"
