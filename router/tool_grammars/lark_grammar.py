"""LarkGrammar: a client's grammar in Lark, rewritten so that it can be a part of another grammar.

llguidance splits a text into terminals from left to right, and never takes a character back. A terminal swallows the
first character of the next one if it can go on with that character. Inside of a JSON string all escapes begin with a
backslash, so terminals with line breaks, quotation marks or backslashes swallow each other's. A grammar without
recursion avoids this: it becomes one terminal, which is one regular expression for llguidance.
"""

import json
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.tool_grammars.json_quoted import check_length, quote_pattern, quote_text

_TOKEN: Final = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<import>%import\b[^\n]*)
    |(?P<range>"(?:\\.|[^"\\\n])++"[ \t]*+\.\.[ \t]*+"(?:\\.|[^"\\\n])++")
    |(?P<string>"(?:\\.|[^"\\\n])*+"i?)
    |(?P<pattern>/(?:\\.|[^/\\])++/[imslux]*)
    |(?P<unclosed>"(?:\\.|[^"\\\n])*+|/(?:\\.|[^/\\])*+)
    |(?P<alias>->[ \t]*\w+)
    |(?P<name>(?:^[!?]{1,2})?_?(?:[a-z][_a-z0-9-]*|[A-Z][_A-Z0-9-]*))
    |(?P<foreign>%(?!ignore\b)\w*|<[^<>\s]+>|@[\w-]+|~(?!\s*\d)|&)
    |(?P<ignore>%ignore)
    |(?P<space>\s+)
    |(?P<other>.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_IMPORT: Final = re.compile(
    r"%import\s+common\s*(?:\.\s*(?P<one>\w+)\s*(?:->\s*(?P<alias>\w+)\s*)?|\((?P<several>[\w\s,]+)\)\s*)(?:(?:\#|//).*)?"
)
# The terminals of Lark's library whose texts have characters that JSON escapes.
_COMMON: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
}


class LarkGrammar:
    """`text`: in llguidance's dialect of Lark. It is not checked; llguidance refuses what is wrong."""

    def __init__(self, text: str) -> None:
        self._tokens = [(found.lastgroup or "", found[0]) for found in _TOKEN.finditer(text)]

    @cached_property
    def is_regular(self) -> bool:
        """Whether the grammar can be one terminal: it has no recursion, no %ignore, and no part that a terminal cannot
        have."""
        if any(kind in ("foreign", "ignore") for kind, _ in self._tokens):
            return False
        uses: dict[str, set[str]] = {}
        current: set[str] | None = None
        for index, (kind, text) in enumerate(self._tokens):
            if kind != "name":
                continue
            if self._is_defined_at(index):
                current = uses.setdefault(text.lstrip("?!"), set())
            elif current is None or self._begins_line(index):
                return False  # the rule has attributes
            else:
                current.add(text)
        return "start" in uses and not _is_recursive(uses)

    def as_terminals(self, prefix: str, *, is_quoted: bool) -> tuple[str, str]:
        """(name of the terminal that matches the grammar's texts, definitions of that terminal and of those in it). All
        names begin with `prefix`. `is_quoted`: the terminal matches the texts in their form inside of a JSON string.
        Only for a grammar that `is_regular`. Raises InvalidRequest as `quoted` does."""
        made, length = list[str](), 0
        for kind, text in self._tokens:
            match kind:
                case "name":
                    pieces = [_terminal(prefix, text)]
                case "import":
                    pieces = [*_imported(text, prefix, is_quoted=is_quoted)]
                case "comment" | "alias":
                    pieces = []
                case _:
                    pieces = [_quoted(kind, text) if is_quoted else text]
            made += pieces
            length = check_length(length + sum(map(len, pieces)))
        return _terminal(prefix, "start"), "".join(made)

    def quoted(self) -> str:
        """A grammar of the same texts in their form inside of a JSON string. Raises InvalidRequest for a part that has
        no translation; the message begins with "has"."""
        foreign = next((text for kind, text in self._tokens if kind == "foreign"), None)
        if foreign is not None:
            raise InvalidRequest(f"has {foreign[:40]!r}")
        made, escaped, length = list[str](), set[str](), 0
        for kind, text in self._tokens:
            pieces = [*_imported(text, "", is_quoted=True)] if kind == "import" else [_quoted(kind, text)]
            escaped |= {piece for piece in pieces if piece != text and "\\" in piece}
            made += pieces
            length = check_length(length + sum(map(len, pieces)))
        if len(escaped) > 1:
            raise InvalidRequest(
                "has recursion or ignored text, and several terminals with quotation marks, backslashes or line breaks"
            )
        return "".join(made)

    def _is_defined_at(self, index: int) -> bool:
        """Whether the name at `index` begins a definition."""
        behind = (text for kind, text in self._tokens[index + 1 : index + 3] if kind != "space")
        return next(behind, "") == ":"

    def _begins_line(self, index: int) -> bool:
        return index == 0 or (self._tokens[index - 1][0] == "space" and "\n" in self._tokens[index - 1][1])


def escape_slashes(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def _terminal(prefix: str, name: str) -> str:
    """The name of the terminal for a rule or a terminal."""
    kind = "R" if name.lstrip("?!_")[:1].islower() else "T"
    return f"{prefix}_{kind}_{name.lstrip('?!').upper()}" if prefix else name


def _is_recursive(uses: dict[str, set[str]]) -> bool:
    """Whether a name is used in its own definition. `uses`: the names in each definition. Takes linear time."""
    users: dict[str, list[str]] = {}
    for name, used in uses.items():
        for one in used & uses.keys():
            users.setdefault(one, []).append(name)
    open_uses = {name: len(used & uses.keys()) for name, used in uses.items()}
    leaves = [name for name, count in open_uses.items() if not count]
    num_resolved = 0
    while leaves:
        num_resolved += 1
        for name in users.get(leaves.pop(), ()):
            open_uses[name] -= 1
            if not open_uses[name]:
                leaves.append(name)
    return num_resolved < len(uses)


def _imported(text: str, prefix: str, *, is_quoted: bool) -> Iterator[str]:
    """The definitions of the terminals that an %import names, each at the beginning of a line."""
    found = _IMPORT.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"has {text[:40]!r}")
    names = [found["one"]] if found["one"] else [name.strip() for name in found["several"].split(",") if name.strip()]
    for name in names:
        local = _terminal(prefix, found["alias"] or name)
        if is_quoted and name in _COMMON:
            yield f"\n{local}: /{_quoted_common(name)}/"
        else:
            yield f"\n%import common.{name} -> {local}"


@cache
def _quoted_common(name: str) -> str:
    """The pattern of a terminal in _COMMON as it is inside of a JSON string."""
    return escape_slashes(quote_pattern(_COMMON[name]))


def _quoted(kind: str, text: str) -> str:
    """A token as it is inside of a JSON string."""
    match kind:
        case "string":
            quoted = quote_text(_read_string(text.removesuffix("i")))
            if text.endswith("i") and "\\" in quoted:
                raise InvalidRequest(f"has {text[:40]!r}")
            return json.dumps(quoted, ensure_ascii=False) + ("i" if text.endswith("i") else "")
        case "range":
            first, last = (_read_string(end) for end in re.split(r'(?<=")[ \t]*\.\.[ \t]*(?=")', text))
            if len(first) != 1 or len(last) != 1:
                raise InvalidRequest(f"has {text[:40]!r}")
            return "/" + quote_pattern(rf"[\x{{{ord(first):x}}}-\x{{{ord(last):x}}}]") + "/"
        case "pattern":
            body, _, flags = text[1:].rpartition("/")
            if "x" in flags:
                raise InvalidRequest(f"has the flag x in {text[:40]!r}")
            return f"/{quote_pattern(body, matches_newlines='s' in flags)}/{flags}"
        case _:
            return text


def _read_string(text: str) -> str:
    """The text of a string in Lark."""
    try:
        value: str = json.loads(re.sub(r"\\x(?=[0-9A-Fa-f]{2})", r"\\u00", text))
    except ValueError:
        raise InvalidRequest(f"has {text[:40]!r}") from None
    return value
