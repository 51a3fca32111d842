"""Grammar: the structure that an answer must have, for routers and ranks.

A router compiles a grammar before any group gets it, and refuses one that fails. Ranks compute token masks from the
grammar. llguidance and the wire messages are imported late: an engine that uses neither needs only torch and
transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from coatcheck.proto.errors import InvalidParameter, InvalidRequest
from coatcheck.proto.verbose_regex import remove_layout

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

    from coatcheck.proto.stubs.coatcheck_pb2 import StructuredOutput

Kind = Literal["json_schema", "regex", "grammar", "choices"]
KINDS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "grammar", "choices")
MAX_BYTES: Final = 256 * 1024
_MAX_CHOICES: Final = 4096
# One space after commas and colons and no other whitespace, because some models would generate spaces without end. A
# schema's own "x-guidance" overrides this.
JSON_STYLE: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class GrammarRefused(InvalidRequest):
    """The grammar does not compile. `reason`: the message without the name of the field."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text`: the schema, the pattern, the rules, or the choices as a JSON list. `prefix`: rules in Lark for what comes
    before the structure, such as reasoning; "" for nothing."""

    kind: Kind
    text: str
    prefix: str = ""

    def __post_init__(self) -> None:
        """Raise InvalidRequest if `text` is empty or too long."""
        if not self.text.strip():
            raise InvalidParameter(f"structured.{self.kind}", "is empty; set it, or remove structured output")
        for name, text in ((self.kind, self.text), ("prefix", self.prefix)):
            if len(text.encode(errors="replace")) > MAX_BYTES:
                raise InvalidParameter(f"structured.{name}", f"has more than {MAX_BYTES} bytes; it must be shorter")

    @classmethod
    def from_message(cls, message: StructuredOutput) -> Grammar:
        """From the wire. Raises InvalidRequest."""
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest("structured names no kind; it must be json_schema, regex, grammar or choices")
        if kind == "choices":
            return replace(cls.of_choices(list(message.choices.texts)), prefix=message.prefix)
        return cls(kind, getattr(message, kind), message.prefix)

    @classmethod
    def of_choices(cls, texts: list[str]) -> Grammar:
        """A grammar that allows exactly `texts`."""
        if not texts or not all(texts) or len(texts) > _MAX_CHOICES:
            raise InvalidParameter("structured.choices", f"must be 1 to {_MAX_CHOICES} strings, none of them empty")
        return cls("choices", json.dumps(texts))

    def to_message(self) -> StructuredOutput:
        from coatcheck.proto.stubs.coatcheck_pb2 import StructuredOutput

        message = StructuredOutput(prefix=self.prefix)
        if self.kind == "choices":
            message.choices.texts.extend(json.loads(self.text))
        else:
            setattr(message, self.kind, self.text)
        return message

    def to_llguidance(self) -> str:
        """The grammar in llguidance's format. Raise GrammarRefused if llguidance cannot parse it."""
        if not self.prefix:
            return self._structure_to_llguidance()
        structure = self._structure_to_llguidance()
        is_lark = not structure.lstrip().startswith("{")
        inner = {"lark_grammar": structure} if is_lark else json.loads(structure)["grammars"][0]
        whole = {"lark_grammar": "start: @prefix @structure\n"}
        prefix = {"name": "prefix", "lark_grammar": self.prefix}
        return json.dumps({"grammars": [whole, prefix, {**inner, "name": "structure"}]})

    def _structure_to_llguidance(self) -> str:
        """As `to_llguidance`, without the prefix."""
        import llguidance

        try:
            if self.kind == "json_schema":
                schema = json.loads(self.text)
                if isinstance(schema, bool):
                    schema = {} if schema else {"not": {}}
                return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
            if self.kind == "choices":
                # A terminal: the parser does not support more than 2,000 alternatives in a rule.
                choices = " | ".join(json.dumps(choice) for choice in json.loads(self.text))
                return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
            text = remove_layout(self.text) if self.kind == "regex" else self.text
            return llguidance.grammar_from(self.kind, text)
        except (ValueError, RecursionError) as error:
            raise self.compile_error(error) from None

    def check_compiles(self) -> None:
        """Raise GrammarRefused if the grammar does not compile. Takes milliseconds, or more for a large grammar."""
        import llguidance

        error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(self.to_llguidance())
        if error:
            raise self.compile_error(messages[0])

    def compile_error(self, reason: object) -> GrammarRefused:
        """The error for a grammar that does not compile."""
        text = " ".join(str(reason).split())[:500]
        return GrammarRefused(f"structured.{self.kind} cannot be compiled: {text}; change the named part", text)


def describe_matcher_error(matcher: LLMatcher) -> str:
    """One line: why `matcher` has an error or allows no token."""
    message = matcher.get_error().partition("\n")[0]
    if wide := re.search(r"Current row has (\d+) items; max is (\d+)", message):
        return (
            f"it has {wide[1]} alternatives at one position, and {wide[2]} are allowed; an optional property counts as "
            "four, a required property does not count"
        )
    return "it allows no further text" if message in ("", "NoExtensionBias") else message
