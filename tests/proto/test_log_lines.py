"""The log formats: each record is one line with its fields, as JSON or as text."""

import io
import json
import logging

from coatcheck.proto.log_lines import JsonLines, TextLines


def logged(formatter: logging.Formatter, message: str, *, error: bool = False, **fields: object) -> str:
    """The output of one log call."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("coatcheck.test")
    log.addHandler(handler)
    try:
        raise ValueError("a defect") if error else KeyError
    except (ValueError, KeyError):
        log.info(message, extra=fields, exc_info=error)
    return stream.getvalue()


def test_json_is_one_object_a_line() -> None:
    """A record is one JSON object on one line, with its fields, also if it has line breaks or a traceback."""
    text = logged(JsonLines({"router": "r0"}), "two\nlines", error=True, request_id="r1", tokens=7, odd={1, 2})
    assert text.count("\n") == 1
    line = json.loads(text)
    assert (line["level"], line["message"], line["router"]) == ("info", "two\nlines", "r0")
    assert (line["request_id"], line["tokens"], line["odd"]) == ("r1", 7, "{1, 2}")
    assert "ValueError: a defect" in line["error"] and line["time"].endswith("Z")


def test_text_has_the_fields_behind_the_message() -> None:
    """Fields follow the message as name=value. A line break in a value is escaped, so that it cannot forge a line."""
    text = logged(TextLines({"rank": "g0/1"}), "ended", request_id="r1\nERROR forged", tokens=7)
    assert text.count("\n") == 1
    assert text.rstrip().endswith(r"ended rank='g0/1' request_id='r1\nERROR forged' tokens=7")
