"""CustomFunction: a custom tool of OpenAI, whose input is a text, as a function with the argument `input`.

Models know only functions, so the chat template shows the tool as one. CustomCallReader, in the folder parsing, turns
its calls back into inputs. An InputGrammar constrains the input: as it is in the formats that write strings without
quotation marks, and in its JSON form in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, MAX_BYTES, Grammar
from coatcheck.router.tool_grammars.lark_grammar import LarkGrammar, escape_slashes
from coatcheck.router.tool_grammars.rules import Rules

INPUT: Final = "input"  # the name of the argument


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """`definition`: a grammar in llguidance's dialect of Lark, or a regular expression that matches a whole input."""

    syntax: Literal["lark", "regex"]
    definition: str

    def alone(self) -> Grammar:
        """The grammar of an answer that is an input, for error messages about the definition."""
        return Grammar("grammar", self.definition) if self.syntax == "lark" else Grammar("regex", self._pattern)

    def text_terminal(self, rules: Rules) -> str:
        """The input as a terminal in a rule; "" if it cannot be one."""
        if self.syntax == "regex":
            return f"/(?:{escape_slashes(self._pattern)})/"
        grammar = LarkGrammar(self.definition)
        return rules.define(*grammar.as_terminals(rules.new_name("IN"), is_quoted=False)) if grammar.is_regular else ""

    def text_rule(self) -> str:
        """The input in a rule, if it cannot be a terminal."""
        return f"%lark {{\n{self.definition}\n}}"

    def json_rule(self, rules: Rules) -> str:
        """The input as a JSON string in a rule. Raises InvalidRequest for a part of the definition that has no
        counterpart in JSON."""
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
                f"the grammar of a custom tool {error}; that cannot be enforced in the JSON in which this model writes "
                "calls: remove it, send a regex in its place, or set the tool's format to text"
            ) from None
        return f'"\\"" {text} "\\""'

    @property
    def _pattern(self) -> str:
        """The regular expression without the anchors at its ends."""
        text = self.definition.removeprefix("^")
        return text[:-1] if text.endswith("$") and not text.endswith(r"\$") else text


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """See FunctionSchema. Calls with an `input_grammar` are strict."""

    name: str
    description: str = ""
    input_grammar: InputGrammar | None = None

    @property
    def strict(self) -> bool:
        return self.input_grammar is not None

    @property
    def parameters(self) -> dict[str, Any]:
        text = "The input of the tool, as it is."
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
    """Raises InvalidRequest for definitions of custom tools among `functions` that are together too long to be
    translated in a short time."""
    grammars = [one.input_grammar for one in functions if isinstance(one, CustomFunction)]
    length = sum(len(grammar.definition) for grammar in grammars if grammar is not None)
    if length > MAX_BYTES:
        raise InvalidRequest(
            f"the grammars of the custom tools have {length} characters together; the maximum is {MAX_BYTES}; send "
            "fewer tools or shorter grammars"
        )
