"""ToolParser: finds in a model's text, as it comes, the calls that the text writes out.

    hermes  <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as it likes, between other text
    json    the whole answer is such an object, or a list of them ("parameters" will do as well)
    required  the whole answer is a list of them, which the grammar of tool_grammar holds it to
    named   the whole answer is the arguments of the one function that had to be called

What turns out to be no call is text, and nothing of it is lost. Where a call had to come and the answer was cut, the
last call has the part of its arguments that came: OpenAI and vLLM give it so, and finish_reason says "length". It does
not know tokens, or who would run a call.
"""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal

Form = Literal["hermes", "json", "required", "named"]
_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_BEGUN: Final = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')  # as tool_grammar has calls begin


@dataclass(frozen=True, slots=True)
class Call:
    """`index` counts within the choice; `arguments` is JSON text."""

    index: int
    name: str
    arguments: str
    id: str

    def to_json(self) -> dict[str, Any]:
        """As part of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def form_of(template_source: str) -> Form:
    """How a model writes calls, by what its chat template shows it of earlier ones."""
    return "hermes" if _OPEN in template_source else "json"


class ToolParser:
    """One choice's. `found` is whether any call has come; `most` bounds how many are passed on."""

    def __init__(self, form: Form, *, name: str = "", most: int | None = None) -> None:
        self._form = form
        self._name = name
        self._most = most
        self._held = ""
        self._count = 0
        self._plain = False  # what began as no call is text to its end
        self._is_cut = False

    @property
    def found(self) -> bool:
        """Whether any call has come, and each of them whole."""
        return self._count > 0 and not self._is_cut

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Takes the next piece; returns what of it is plain text, and the calls that it completes."""
        self._held += text
        if self._form == "hermes":
            return self._blocks()
        if self._form in ("json", "required") and not self._plain:
            self._plain = not self._held.lstrip().startswith(("{", "[")) and bool(self._held.strip())
        return (self._take(), []) if self._plain else ("", [])

    def end(self) -> tuple[str, list[Call]]:
        """The text has ended: what was held back is a call or text."""
        held = self._take()
        if self._form == "named" and held:
            return "", self._call([{"name": self._name, "arguments": held}])
        if self._form in ("json", "required") and not self._plain and (calls := self._parse(held)):
            return "", calls
        if self._form == "required" and held.startswith("["):
            return "", self._parse_cut(held)
        if self._form == "hermes" and held.startswith(_OPEN) and (calls := self._parse(held[len(_OPEN) :])):
            return "", calls  # the closing mark was a stop token, or was cut off
        return held, []

    def _blocks(self) -> tuple[str, list[Call]]:
        shown, calls = "", list[Call]()
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            shown += self._held[:start]
            self._held = self._held[start:]
            if end < 0:
                return shown, calls
            block = self._held[len(_OPEN) : end - start]
            parsed = self._parse(block)
            if parsed is None:
                shown += self._held[: end - start + len(_CLOSE)]
            calls += parsed or []
            self._held = self._held[end - start + len(_CLOSE) :].lstrip("\n")
        starts = (length for length in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:length]))
        kept = next(starts, 0)
        shown += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return shown, calls

    def _parse(self, text: str) -> list[Call] | None:
        """None when it is no call."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = value if isinstance(value, list) else [value]
        made = []
        for entry in found:
            if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
                return None
            arguments = entry.get("arguments", entry.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            made.append({"name": name, "arguments": text})
        return self._call(made) if made else None

    def _parse_cut(self, text: str) -> list[Call]:
        """The calls of a list that max_tokens has cut: the complete ones, then the incomplete last one."""
        self._is_cut = True
        decoder, at, made = json.JSONDecoder(), 1, list[dict[str, str]]()
        try:
            while True:
                entry, end = decoder.raw_decode(text, at)
                made.append({"name": entry["name"], "arguments": json.dumps(entry["arguments"], ensure_ascii=False)})
                at = end + len(", ")
        except (ValueError, RecursionError):
            pass
        if begun := _BEGUN.match(text, at):
            made.append({"name": json.loads(begun[1]), "arguments": text[begun.end() :]})
        return self._call(made)

    def _call(self, made: list[dict[str, str]]) -> list[Call]:
        room = len(made) if self._most is None else max(0, self._most - self._count)
        calls = [
            Call(self._count + place, entry["name"], entry["arguments"], f"call_{uuid.uuid4().hex[:24]}")
            for place, entry in enumerate(made[:room])
        ]
        self._count += len(calls)
        return calls

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
