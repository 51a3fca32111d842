"""Log lines: what a process logs, one line a record, as text or as JSON, with the fields that a record brings.

    log.info("request answered", extra={"request_id": "r1", "tokens": 7})

A tool that follows one request through router and ranks searches for its request_id. It does not know who reads them.
"""

import json
import logging
import sys
import time
from typing import Any, Final, Literal, TextIO, get_args

from coatcheck.proto.errors import InvalidConfig

LogFormat = Literal["text", "json"]
_OWN: Final = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


def check_log_format(written: str) -> None:
    """Raises InvalidConfig for any other."""
    if written not in get_args(LogFormat):
        raise InvalidConfig(f"log-format is {written!r}; it must be text or json")


def configure_logging(written: str, *, stream: TextIO | None = None, **always: str) -> None:
    """All that this process logs from INFO on goes to `stream` (stderr) so; `always` are fields of every line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(always) if written == "json" else TextLines(always))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the call put into `extra`; what libraries add for themselves (Ray does) begins with an underscore."""
    return {name: value for name, value in vars(record).items() if name not in _OWN and not name.startswith("_")}


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the fields, and `error` with a traceback."""

    def __init__(self, always: dict[str, str]) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """The line; a value that JSON does not know becomes its text."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **fields_of(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """For people: the fields follow the message as name=value."""

    def __init__(self, always: dict[str, str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._always = always

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A line break in a value must not forge a line."""
        fields = {**self._always, **fields_of(record)}
        words = [f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()]
        return " ".join([super().formatMessage(record), *words])
