"""Grammar: what an answer must be, as every rank and router reads it.

Both ends of the wire need the same reading: the router refuses what does not compile before any group hears of it, and
the ranks make the masks. It does not know models: a vocabulary is the caller's. Imports of what only the wire or a
grammar needs come late: an engine without either runs on torch and transformers alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from coatcheck.proto.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

    from coatcheck.proto.stubs.coatcheck_pb2 import StructuredOutput

Kind = Literal["json_schema", "regex", "grammar", "choices"]
KINDS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "grammar", "choices")
MAX_BYTES: Final = 256 * 1024
_MAX_CHOICES: Final = 4096
# One space behind commas and colons and no other: a model that may write spaces for ever sometimes does. A schema's own
# "x-guidance" overrides it.
JSON_STYLE: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class GrammarRefused(InvalidRequest):
    """A grammar that does not compile. `reason` alone does not name the field that the grammar came in."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is the schema, the pattern, the rules, or the choices as a JSON list."""

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        """Raises InvalidRequest for what is empty or too long to compile."""
        if not self.text.strip():
            raise InvalidRequest(f"structured.{self.kind} is empty; it must be given, or structured output left out")
        if len(self.text.encode(errors="replace")) > MAX_BYTES:
            raise InvalidRequest(f"structured.{self.kind} has more than {MAX_BYTES} bytes; it must be shorter")

    @classmethod
    def from_message(cls, message: StructuredOutput) -> Grammar:
        """The wire form; raises InvalidRequest."""
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest("structured names no kind; it must be json_schema, regex, grammar or choices")
        if kind == "choices":
            return cls.of_choices(list(message.choices.texts))
        return cls(kind, getattr(message, kind))

    @classmethod
    def of_choices(cls, texts: list[str]) -> Grammar:
        """One of these."""
        if not texts or not all(texts) or len(texts) > _MAX_CHOICES:
            raise InvalidRequest(f"structured.choices must be 1 to {_MAX_CHOICES} strings, none of them empty")
        return cls("choices", json.dumps(texts))

    def to_message(self) -> StructuredOutput:
        """The wire form."""
        from coatcheck.proto.stubs.coatcheck_pb2 import StructuredOutput

        message = StructuredOutput()
        if self.kind == "choices":
            message.choices.texts.extend(json.loads(self.text))
        else:
            setattr(message, self.kind, self.text)
        return message

    def compiled(self) -> str:
        """As llguidance takes it; raises InvalidRequest for what it cannot read."""
        import llguidance

        try:
            if self.kind == "json_schema":
                schema = json.loads(self.text)
                if isinstance(schema, bool):
                    schema = {} if schema else {"not": {}}
                return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
            if self.kind == "choices":
                # One terminal. As alternatives of a rule, more than 2,000 choices are too many items for the parser.
                choices = " | ".join(json.dumps(choice) for choice in json.loads(self.text))
                return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
            return llguidance.grammar_from(self.kind, self.text)
        except (ValueError, RecursionError) as error:
            raise self.refused(error) from None

    def check(self) -> None:
        """Raises InvalidRequest that says why it does not compile. Takes milliseconds, for large ones many."""
        import llguidance

        error, said = llguidance.LLMatcher.validate_grammar_with_warnings(self.compiled())
        if error:
            raise self.refused(said[0])

    def refused(self, reason: object) -> GrammarRefused:
        """The error for a grammar that does not compile."""
        text = " ".join(str(reason).split())[:500]
        return GrammarRefused(f"structured.{self.kind} cannot be compiled: {text}; change what it names", text)


def why_unusable(matcher: LLMatcher) -> str:
    """In a line, why a matcher has an error or allows no token."""
    said = matcher.get_error().partition("\n")[0]
    if wide := re.search(r"Current row has (\d+) items; max is (\d+)", said):
        return (
            f"it has {wide[1]} alternatives at one place of the text, where {wide[2]} are the most; an optional "
            "property counts four, a required one does not"
        )
    return "it allows no text that goes on from here" if said in ("", "NoExtensionBias") else said
