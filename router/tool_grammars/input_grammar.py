"""CustomFunction: shows a custom tool of OpenAI to the model as a function with one text argument, `input`.

Models know only functions. CustomCallReader, in the folder parsing, turns the calls of the function back into inputs.
An InputGrammar constrains the input. Formats that write strings without quotation marks use the grammar as it is. The
others use a translation that matches the input inside of a JSON string.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, MAX_BYTES, Grammar
from coatcheck.proto.verbose_regex import remove_layout
from coatcheck.router.tool_grammars.lark_grammar import LarkGrammar, escape_slashes
from coatcheck.router.tool_grammars.rules import Rules

INPUT: Final = "input"  # the name of the argument


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """`definition`: a grammar in llguidance's dialect of Lark, or a regular expression that matches a whole input."""

    syntax: Literal["lark", "regex"]
    definition: str

    def alone(self) -> Grammar:
        """The grammar of the input without a call around it. Its errors are about the definition alone."""
        if self.syntax == "lark":
            return Grammar("grammar", f"{self.definition}\n//")  # never blank, which a Grammar must not be
        return Grammar("regex", f"(?:{self._pattern})")

    def text_terminal(self, rules: Rules) -> str:
        """What stands in a rule for a terminal that matches the input as it is; "" if no terminal can."""
        if self.syntax == "regex":
            return f"/(?:{escape_slashes(self._pattern)})/"
        grammar = LarkGrammar(self.definition)
        if not grammar.is_regular:
            return ""
        try:
            return rules.define(*grammar.as_terminals(rules.new_name("IN"), is_quoted=False))
        except InvalidRequest:  # llguidance's error about the definition as it is says more
            return ""

    def text_rule(self) -> str:
        """The body of a rule that matches the input as it is, where no terminal can."""
        return f"%lark {{\n{self.definition}\n}}"

    def json_rule(self, rules: Rules) -> str:
        """The body of a rule that matches the input as a JSON string. Raises InvalidRequest for a part of the
        definition that has no translation."""
        if self.syntax == "regex":
            return rules.schema({"type": "string", "pattern": f"^(?:{self._pattern})$", "x-guidance": dict(JSON_STYLE)})
        grammar = LarkGrammar(self.definition)
        try:
            if grammar.is_regular:
                text = rules.define(*grammar.as_terminals(rules.new_name("IN"), is_quoted=True))
            else:
                text = rules.new_rule("input", f"%lark {{\n{grammar.quoted()}\n}}")
        except InvalidRequest as error:
            raise InvalidRequest(
                f"the grammar of a custom tool {error}, which cannot be enforced in the JSON that this model writes "
                "for calls; change that part, send a regex in place of the grammar, or set the tool's format to text"
            ) from None
        return f'"\\"" {text} "\\""'

    def require_absent(self, end: str) -> None:
        """Raises InvalidRequest if the definition spells `end`, the tag after the input in a format that writes inputs
        as they are: the parser would end the input there. Patterns that may match the tag are not found."""
        spelled = re.sub(r"\\(.)", r"\1", self.definition, flags=re.DOTALL)
        if end in spelled:
            raise InvalidRequest(
                f"the grammar of a custom tool has {end!r}, which ends the input in the form in which this model "
                "writes calls; remove it from the grammar, or set the tool's format to text"
            )

    @property
    def _pattern(self) -> str:
        """The regular expression without the layout of the flag x, and without the anchors at its ends."""
        text = remove_layout(self.definition).removeprefix("^")
        return text[:-1] if text.endswith("$") and not text.endswith(r"\$") else text


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """A custom tool in the form of FunctionSchema. It is strict if it has an `input_grammar`."""

    name: str
    description: str = ""
    input_grammar: InputGrammar | None = None

    @property
    def strict(self) -> bool:
        return self.input_grammar is not None

    @property
    def parameters(self) -> dict[str, Any]:
        text = "The input of the tool, as plain text."
        if (grammar := self.input_grammar) is not None:
            kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            text = f"{text} It must match this {kind}:\n{grammar.definition}"
        return {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": text}},
            "required": [INPUT],
            "additionalProperties": False,
        }

    def shown(self) -> dict[str, Any]:
        """The function as chat templates get it."""
        description = {"description": self.description} if self.description else {}
        return {"name": self.name, **description, "parameters": self.parameters}


def check_definitions(functions: Sequence[object]) -> None:
    """Raises InvalidRequest if the grammars of the custom tools among `functions` have over MAX_BYTES characters
    together. Translating that many takes less than a second."""
    grammars = [one.input_grammar for one in functions if isinstance(one, CustomFunction)]
    length = sum(len(grammar.definition) for grammar in grammars if grammar is not None)
    if length > MAX_BYTES:
        raise InvalidRequest(
            f"the grammars of the custom tools have {length} characters together; the maximum is {MAX_BYTES}; send "
            "fewer tools or shorter grammars"
        )
