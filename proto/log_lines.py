"""The log format of every process: one line per record, as text or JSON, with the fields in `extra`.

    log.info("request answered", extra={"request_id": "r1", "tokens": 7})

Search for a request_id to follow a request through router and ranks.
"""

import json
import logging
import sys
import time
from typing import Any, Final, Literal, TextIO

LogFormat = Literal["text", "json"]
_RESERVED: Final = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


def configure_logging(log_format: LogFormat, *, stream: TextIO | None = None, **always: str) -> None:
    """Log records of level INFO and above to `stream` (default: stderr). `always`: fields of every line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(always) if log_format == "json" else TextLines(always))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields in `extra`. Names that begin with an underscore are left out: libraries such as Ray add them."""
    return {name: value for name, value in vars(record).items() if name not in _RESERVED and not name.startswith("_")}


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the fields, and `error` with a traceback."""

    def __init__(self, always: dict[str, str]) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Values that JSON cannot represent become their str()."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **extra_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """The fields follow the message as name=value."""

    def __init__(self, always: dict[str, str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._always = always

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Strings are quoted with repr(), so that a line break in a value cannot forge a log line."""
        fields = {**self._always, **extra_fields(record)}
        words = [f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()]
        return " ".join([super().formatMessage(record), *words])
