"""ToolParser: finds tool calls in the text of a model while it is generated. There are four formats:

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, between other text
    json      the whole text is such an object, or a list of them ("parameters" may stand for "arguments")
    required  the whole text is a list of them, constrained by the grammar of tools.py
    named     the whole text is the arguments of the function that tool_choice names

Text that begins like a call but is none is returned as text. If max_tokens cuts a call that tool_choice requires, the
call has the part of its arguments that was generated, and finish_reason is "length", as with OpenAI and vLLM.
"""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal

ToolCallFormat = Literal["hermes", "json", "required", "named"]
_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_BEGUN: Final = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')  # how tools.py lets calls begin


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """`index`: the call's number within its choice. `arguments`: JSON text."""

    index: int
    name: str
    arguments: str
    id: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def detect_format(template_source: str) -> ToolCallFormat:
    """The format in which a model writes calls: the one in which its chat template shows earlier calls."""
    return "hermes" if _OPEN in template_source else "json"


class ToolParser:
    """The parser of one choice. `name`: the function, in the format "named". `max_calls`: further calls are dropped."""

    def __init__(self, call_format: ToolCallFormat, *, name: str = "", max_calls: int | None = None) -> None:
        self._format = call_format
        self._name = name
        self._max_calls = max_calls
        self._held = ""
        self._count = 0
        self._is_plain = False  # the text does not begin like a call, so all of it is text
        self._is_cut = False

    @property
    def has_complete_calls(self) -> bool:
        """Whether there is a call, and none was cut."""
        return self._count > 0 and not self._is_cut

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Takes the next piece of text; returns (text outside of calls, calls that the piece completes)."""
        self._held += text
        if self._format == "hermes":
            return self._parse_hermes()
        if self._format in ("json", "required") and not self._is_plain:
            self._is_plain = not self._held.lstrip().startswith(("{", "[")) and bool(self._held.strip())
        return (self._release_held(), []) if self._is_plain else ("", [])

    def finish(self) -> tuple[str, list[ParsedToolCall]]:
        """Returns the text and calls held back, as `feed` does, at the end of the text."""
        held = self._release_held()
        if self._format == "named" and held:
            return "", self._number_calls([{"name": self._name, "arguments": held}])
        if self._format in ("json", "required") and not self._is_plain and (calls := self._parse(held)):
            return "", calls
        if self._format == "required" and held.startswith("["):
            return "", self._parse_cut(held)
        if self._format == "hermes" and held.startswith(_OPEN) and (calls := self._parse(held[len(_OPEN) :])):
            return "", calls  # the closing tag was a stop token, or was cut
        return held, []

    def _parse_hermes(self) -> tuple[str, list[ParsedToolCall]]:
        shown, calls = "", list[ParsedToolCall]()
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

    def _parse(self, text: str) -> list[ParsedToolCall] | None:
        """The calls in JSON text; None if it is no call."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = value if isinstance(value, list) else [value]
        entries = []
        for entry in found:
            if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
                return None
            arguments = entry.get("arguments", entry.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            entries.append({"name": name, "arguments": text})
        return self._number_calls(entries) if entries else None

    def _parse_cut(self, text: str) -> list[ParsedToolCall]:
        """The calls of a list that max_tokens has cut: the complete ones, then the cut one."""
        self._is_cut = True
        decoder, at, entries = json.JSONDecoder(), 1, list[dict[str, str]]()
        try:
            while True:
                entry, end = decoder.raw_decode(text, at)
                entries.append({"name": entry["name"], "arguments": json.dumps(entry["arguments"], ensure_ascii=False)})
                at = end + len(", ")
        except (ValueError, RecursionError):
            pass
        if begun := _BEGUN.match(text, at):
            entries.append({"name": json.loads(begun[1]), "arguments": text[begun.end() :]})
        return self._number_calls(entries)

    def _number_calls(self, entries: list[dict[str, str]]) -> list[ParsedToolCall]:
        room = len(entries) if self._max_calls is None else max(0, self._max_calls - self._count)
        calls = [
            ParsedToolCall(self._count + place, entry["name"], entry["arguments"], f"call_{uuid.uuid4().hex[:24]}")
            for place, entry in enumerate(entries[:room])
        ]
        self._count += len(calls)
        return calls

    def _release_held(self) -> str:
        held, self._held = self._held, ""
        return held
