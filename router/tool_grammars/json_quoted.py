"""quote_pattern(), quote_text(): translate a regular expression, or a text, to its form inside of a JSON string.

JSON writes quotation marks, backslashes and control characters as escapes. In a pattern such a character becomes its
escape. A class becomes an alternation of two patterns: a class of its characters that JSON does not escape, and the
escapes of its other characters. Only the shortest escape of a character is matched, and only in small letters.
"""

import json
import re
from collections.abc import Collection
from typing import Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import MAX_BYTES

_SHORT: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\\\"}  # as in a class of a pattern
_ESCAPED: Final = frozenset({*range(32), *_SHORT})  # the code points that JSON escapes
_PLAIN: Final = r'[^"\\\x00-\x1f]'  # the others
_LETTERS: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}  # of escapes in a pattern
_SPACE: Final = frozenset({9, 10, 11, 12, 13})
# The code points of _ESCAPED in a class that a letter stands for.
_CLASSES: Final = {
    "d": frozenset[int](), "w": frozenset[int](), "s": _SPACE,
    "D": _ESCAPED, "W": _ESCAPED, "S": _ESCAPED - _SPACE,
}  # fmt: skip
_ESCAPE: Final = re.compile(r"\\(?:x(?P<hex>[0-9A-Fa-f]{2})|(?P<one>[^xuUpP0-9]))", re.DOTALL)
_WIDE: Final = re.compile(r"\\(?:x|u)\{([0-9A-Fa-f]{1,6})\}|\\u([0-9A-Fa-f]{4})")
_FLAGS: Final = re.compile(r"\(\?(?P<on>[imsU]*)(?:-(?P<off>[imsU]+))?(?P<end>[:)])|\(\?P?<[A-Za-z_]\w*>")
_OTHER_FLAGS: Final = re.compile(r"\(\?[A-Za-z-]+[:)]")


def quote_pattern(pattern: str, *, matches_newlines: bool = False) -> str:
    """The pattern of the texts that `pattern` matches, as JSON writes them. `matches_newlines`: a dot matches newlines
    too. Raises InvalidRequest for a part of `pattern` that is not translated; the message begins with "has"."""
    made: list[str] = []
    flags: list[bool] = []  # matches_newlines outside of each open group
    at = length = 0
    while at < len(pattern):
        one = pattern[at]
        end = at + 1
        if one == "\\":
            text, end = _quote_escape(pattern, at)
        elif one == "[":
            text, end = _quote_class(pattern, at)
        elif one == ".":
            text = _ANY if matches_newlines else _ANY_BUT_NEWLINE
        elif one == "(":
            flags.append(matches_newlines)
            text = one
            if pattern.startswith("(?", at):
                if (found := _FLAGS.match(pattern, at)) is None:
                    if (other := _OTHER_FLAGS.match(pattern, at)) is not None:
                        raise InvalidRequest(
                            f"has the flags {other[0][:40]!r}, of which only i, m, s and U are possible"
                        )
                    raise _refusal(pattern[at : at + 4])
                text, end = found[0], found.end()
                matches_newlines = ("s" in (found["on"] or "") or matches_newlines) and "s" not in (found["off"] or "")
                if found["end"] == ")":
                    flags.pop()
        elif one == ")":
            matches_newlines = flags.pop() if flags else matches_newlines
            text = one
        else:
            text = _join("", {ord(one)}) if ord(one) in _ESCAPED else one
        made.append(text)
        length = check_length(length + len(text))
        at = end
    return "".join(made)


def check_length(length: int) -> int:
    """Returns `length`, of a text in a grammar. Raises InvalidRequest, as `quote_pattern` does, if that is too long:
    one character of a pattern may become 200."""
    if length > MAX_BYTES:
        raise InvalidRequest(f"has over {MAX_BYTES} characters when its quotation marks and line breaks are escaped")
    return length


def quote_text(text: str) -> str:
    """A text between the quotation marks of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quote_escape(pattern: str, at: int) -> tuple[str, int]:
    """(the escape at `at` in quoted form, where it ends)."""
    codes, end, is_class = _read_escape(pattern, at)
    text = pattern[at:end]
    if is_class:
        return (_join(f"[{text}&&{_PLAIN}]", codes) if codes else text), end
    return (_join("", codes) if codes else text), end


def _read_escape(pattern: str, at: int) -> tuple[Collection[int], int, bool]:
    """(the code points of _ESCAPED that the escape at `at` matches, where it ends, whether it is a class)."""
    if (wide := _WIDE.match(pattern, at)) is not None:
        return _ESCAPED & {int(wide[1] or wide[2], 16)}, wide.end(), False
    found = _ESCAPE.match(pattern, at)
    if found is None:
        raise _refusal(pattern[at : at + 3])
    if found["hex"]:
        return _ESCAPED & {int(found["hex"], 16)}, found.end(), False
    one = found["one"]
    if one in _CLASSES:
        return _CLASSES[one], found.end(), True
    return _ESCAPED & {_LETTERS.get(one, ord(one))}, found.end(), False


def _quote_class(pattern: str, start: int) -> tuple[str, int]:
    """(the class that begins at `start` in quoted form, where it ends)."""
    is_negated = pattern.startswith("[^", start)
    at = first = start + 1 + is_negated
    codes: set[int] = set()
    is_plain = is_negated  # whether the class may have characters that JSON does not escape
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        low, end, is_class = _read_member(pattern, at)
        if is_class:
            codes |= set(low) & _ESCAPED
            is_plain = True
        elif pattern.startswith("-", end) and not pattern.startswith("-]", end):
            high, end, ends_with_class = _read_member(pattern, end + 1)
            if ends_with_class:
                raise _refusal(pattern[at:end])
            (lowest,), (highest,) = low or (0,), high or (0,)
            codes |= {code for code in _ESCAPED if lowest <= code <= highest}
            is_plain = True
        else:
            codes |= set(low) & _ESCAPED
            is_plain = is_plain or not set(low) <= _ESCAPED
        at = end
    if at >= len(pattern):
        raise _refusal(pattern[start:])
    text = pattern[start : at + 1]
    if is_negated:
        codes = set(_ESCAPED - codes)
    if not codes:
        return text, at + 1
    return _join(f"[{text}&&{_PLAIN}]" if is_plain else "", codes), at + 1


def _read_member(pattern: str, at: int) -> tuple[Collection[int], int, bool]:
    """(code points, end, whether it is a class) of the member at `at`, which is in a class. A member that is a class
    itself has only those of its code points that JSON escapes; any other member has one."""
    one = pattern[at : at + 1]
    if one == "[" or pattern[at : at + 2] in ("&&", "--", "~~"):
        raise _refusal(f"{pattern[at : at + 2]} in a class")
    if one != "\\":
        return {ord(one)} if one else (), at + 1, False
    codes, end, is_class = _read_escape(pattern, at)
    if is_class or codes:
        return codes, end, is_class
    text = pattern[at:end]
    digits = re.sub(r"[^0-9A-Fa-f]", "", text[2:])
    return {int(digits, 16) if digits else ord(text[1])}, end, False


def _join(plain: str, codes: Collection[int]) -> str:
    """A pattern that matches what `plain` matches, and the JSON escape of each of `codes`. The flag i of a pattern has
    no effect on the escapes in it."""
    short = "".join(_SHORT[code] for code in sorted(codes) if code in _SHORT)
    long = [f"{code:02x}" for code in sorted(codes) if code not in _SHORT]
    escapes = [rf"\\[{short}]"] if short else []
    if long:
        escapes.append(rf"\\u00(?:{'|'.join(long)})")
    made = f"(?-i:{'|'.join(escapes)})"
    return f"(?:{plain}|{made})" if plain else made


_ANY: Final = _join(_PLAIN, _ESCAPED)  # a dot with the flag s
_ANY_BUT_NEWLINE: Final = _join(_PLAIN, _ESCAPED - {10})


def _refusal(part: str) -> InvalidRequest:
    return InvalidRequest(f"has {part[:40]!r}")
