"""read_trace: arrival times and lengths of real requests, from the published files of Mooncake and Azure.

Files may be gzipped. A Mooncake line has the ids of its 512-token prefix blocks, so shared prefixes are known. An Azure
row has only lengths.
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidConfig

BLOCK_TOKENS = 512
_MAX_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. `at`: seconds since the first request. `blocks`: ids of its prefix blocks, if known."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceEntry]:
    """The first `limit` requests of a .jsonl (Mooncake) or .csv (Azure) file. Raise InvalidConfig for a bad file."""
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in (".jsonl", ".csv"):
        raise InvalidConfig(f"{path.name} is neither .jsonl (Mooncake) nor .csv (Azure), plain or .gz")
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            entries = list(islice(_mooncake(file) if kind == ".jsonl" else _azure(file), limit))
    except OSError as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error}; fetch it again") from None
    if not entries:
        raise InvalidConfig(f"the trace {path} holds no request")
    first = min(entry.at for entry in entries)
    shifted = [TraceEntry(e.at - first, e.input_len, e.output_len, e.blocks) for e in entries]
    return sorted(shifted, key=lambda entry: entry.at)


def _mooncake(file: io.TextIOBase) -> Iterator[TraceEntry]:
    for number, line in enumerate(file, 1):
        try:
            row: dict[str, Any] = dict(json.loads(line))
            blocks = tuple(map(int, row.get("hash_ids", ())))
            yield _entry(row["timestamp"] / 1000, row["input_length"], row["output_length"], blocks)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            fields = "timestamp, input_length, output_length"
            raise InvalidConfig(f"line {number} of the trace is not a Mooncake request ({fields}): {error!r}") from None


def _azure(file: io.TextIOBase) -> Iterator[TraceEntry]:
    number = 1
    try:
        for number, row in enumerate(csv.DictReader(file), 2):
            yield _azure_entry(row, number)
    except csv.Error as error:
        raise _not_azure(number + 1, error) from None


def _azure_entry(row: dict[str, Any], line: int) -> TraceEntry:
    try:
        # The file has seven decimals of a second; datetime reads six.
        written = datetime.fromisoformat(row["TIMESTAMP"][:26])
        # UTC, also without an offset: in local time a gap would depend on when clocks are set back here.
        at = written if written.tzinfo else written.replace(tzinfo=UTC)
        return _entry(at.timestamp(), row["ContextTokens"], row["GeneratedTokens"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise _not_azure(line, error) from None


def _not_azure(line: int, error: Exception) -> InvalidConfig:
    fields = "TIMESTAMP, ContextTokens, GeneratedTokens"
    return InvalidConfig(f"line {line} of the trace is not an Azure row ({fields}): {error!r}")


def _entry(at: float, input_len: Any, output_len: Any, blocks: tuple[int, ...] = ()) -> TraceEntry:
    """Raise ValueError, TypeError or OverflowError for numbers that no request has."""
    entry = TraceEntry(at, int(input_len), int(output_len), blocks)
    if not math.isfinite(at):
        raise ValueError(f"the time is {at}; it must be finite")
    for length in (entry.input_len, entry.output_len):
        if not 0 <= length <= _MAX_TOKENS:
            raise ValueError(f"{length} tokens; it must be from 0 to {_MAX_TOKENS}")
    if blocks and min(blocks) < 0:
        raise ValueError(f"the block {min(blocks)}; ids are not negative")
    return entry
