"""Log lines: each is one line that a machine, or a person, can read, with its fields."""

import io
import json
import logging

from coatcheck.proto.log_lines import JsonLines, TextLines


def logged(formatter: logging.Formatter, message: str, *, error: bool = False, **fields: object) -> str:
    """What one call writes."""
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
    """Fields stand beside time, level and message; a traceback and line breaks stay within the line."""
    text = logged(JsonLines({"router": "r0"}), "two\nlines", error=True, request_id="r1", tokens=7, odd={1, 2})
    assert text.count("\n") == 1
    line = json.loads(text)
    assert (line["level"], line["message"], line["router"]) == ("info", "two\nlines", "r0")
    assert (line["request_id"], line["tokens"], line["odd"]) == ("r1", 7, "{1, 2}")
    assert "ValueError: a defect" in line["error"] and line["time"].endswith("Z")


def test_text_has_the_fields_behind_the_message() -> None:
    """A person finds them as name=value, and a value cannot forge a line."""
    text = logged(TextLines({"rank": "g0/1"}), "ended", request_id="r1\nERROR forged", tokens=7)
    assert text.count("\n") == 1
    assert text.rstrip().endswith(r"ended rank='g0/1' request_id='r1\nERROR forged' tokens=7")
