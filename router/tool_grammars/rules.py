"""Rules: the rules of one grammar in llguidance's dialect of Lark, whose markers may be special tokens.

No text of a grammar matches a special token. So the special tokens in a marker are written as tokens, and other parts
of the marker as text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import MAX_BYTES
from coatcheck.router.parsing.reasoning_parser import begins_with_token, has_token, marker_rule

ANY_TEXT: Final = "/(?s:.*)/"
# Max bytes of all documents together, equal ones included. Each argument may repeat the definitions of its function, so
# a body of a few megabytes could become gigabytes of documents.
_MAX_DOCUMENT_BYTES: Final = 16 * MAX_BYTES


class Rules:
    """`special_ids`: the ids of special tokens by their text. Names of functions need no escapes (see
    FunctionSchema)."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []
        self._schemas: dict[str, str] = {}
        self._document_bytes = 0

    def has(self, *markers: str) -> bool:
        """Whether all markers are special tokens."""
        return all(marker in self._special_ids for marker in markers)

    def has_token(self, marker: str) -> bool:
        """Whether a marker is a special token, or has one in it."""
        return has_token(marker, self._special_ids)

    def marker(self, marker: str) -> str:
        """A marker in a rule."""
        return marker_rule(marker, self._special_ids)

    def between(self, start: str, inner: str, end: str) -> str:
        """`inner` between two markers if both are special tokens; else `inner` alone."""
        return f"{self.marker(start)} {inner} {self.marker(end)}" if self.has(start, end) else inner

    def rule(self, name: str, body: str) -> str:
        """Adds a rule; returns its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def new_name(self, kind: str) -> str:
        """A name that begins with `kind` and that no rule has. The next one differs once a rule has been added."""
        return f"{kind}_{len(self._rules)}"

    def new_rule(self, kind: str, body: str) -> str:
        """Adds a rule whose name begins with `kind`; returns its name."""
        return self.rule(self.new_name(kind), body)

    def define(self, name: str, definitions: str) -> str:
        """Adds `definitions`, the text of one or more rules or terminals. Returns `name`, which is one of them."""
        self._rules.append(definitions)
        return name

    def schema(self, document: dict[str, Any]) -> str:
        """The rule for a JSON value that fits a schema. `document`: see schema_document. Raises InvalidRequest if the
        documents together are too long."""
        text = json.dumps(document)
        self._document_bytes += len(text)
        if self._document_bytes > _MAX_DOCUMENT_BYTES:
            raise InvalidRequest(
                f"the schemas of the tools have over {_MAX_DOCUMENT_BYTES} bytes, where each argument of a strict "
                "function may need a copy of $defs; send fewer tools or shorter schemas, or remove strict"
            )
        if text not in self._schemas:
            self._schemas[text] = self.rule(f"schema_{len(self._schemas)}", f"%json {text}")
        return self._schemas[text]

    def text_until(self, name: str, marker: str, text: str = ANY_TEXT) -> str:
        """The rule for `text`, which consists of terminals, and the next `marker` behind it."""
        if begins_with_token(marker, self._special_ids):
            return self.rule(name, f"{text} {self.marker(marker)}")
        return self.rule(f"{name}[lazy]", f"{text} {quote(marker)}").removesuffix("[lazy]")

    def listed(self, name: str, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """A rule for the parts in their order, with separators between them. `parts`: (rule, whether it is required).
        `name`: a part of the names of new rules, which no other call has. `separator`: in quotation marks."""
        if not parts:
            return ""
        first = rest = ""  # the rules for the parts from here on, if none is written yet, and if one is
        for place, (part, is_required) in reversed(list(enumerate(parts))):
            later = f"{separator} {part}" if is_required else f"({separator} {part})?"
            begun = [f"{part} {rest}"] + ([] if is_required or not first else [first])
            first = self.rule(f"first_{name}_{place}", " | ".join(begun))
            rest = self.rule(f"rest_{name}_{place}", f"{later} {rest}")
        return first if any(is_required for _, is_required in parts) else f"({first})?"

    def written(self, start: str) -> str:
        """The grammar, whose first rule has the body `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"


def quote(text: str) -> str:
    """A text in a rule; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""
