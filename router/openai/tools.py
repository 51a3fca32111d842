"""The functions and custom tools that a model may call, as fields of a chat's body.

The folder tool_grammars makes the grammars of their calls, and the parsers of the folder parsing find the calls in the
generated text.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.sampling_fields import RequestBody
from coatcheck.router.tool_grammars.input_grammar import CustomFunction, InputGrammar

MAX_NAME: Final = 128  # characters
ToolName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]
MAX_DEFINITION = 1 << 16  # characters of the grammar of an input


class Function(RequestBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    accepted_values: ClassVar = {"strict": (False,)}

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"] = "function"
    function: Function

    @property
    def schema_path(self) -> str:
        """The field that constrains the arguments."""
        return "function.parameters"

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates get it."""
        return self.model_dump(exclude_none=True)


class AnyInput(RequestBody):
    type: Literal["text"]


class GrammarDefinition(RequestBody):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_DEFINITION)]


class GrammarInput(RequestBody):
    type: Literal["grammar"]
    grammar: GrammarDefinition


class CustomFields(RequestBody):
    name: ToolName
    description: str = ""
    format: Annotated[AnyInput | GrammarInput, Field(discriminator="type")] | None = None


class CustomTool(RequestBody):
    """A tool whose input is a text, which a grammar may constrain."""

    type: Literal["custom"]
    custom: CustomFields

    @property
    def function(self) -> CustomFunction:
        """The function that the model sees in place of the tool."""
        form = self.custom.format
        grammar = form.grammar if isinstance(form, GrammarInput) else None
        return CustomFunction(
            self.custom.name,
            self.custom.description,
            InputGrammar(grammar.syntax, grammar.definition) if grammar is not None else None,
        )

    @property
    def schema_path(self) -> str:
        """The field that constrains the input."""
        return "custom.format.grammar"

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates get it."""
        return {"type": "function", "function": self.function.shown()}


def type_or_function(value: object) -> str:
    """The type of a tool, of a call or of a choice; a function if it has none."""
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return found if isinstance(found, str) else "function"


AnyTool: TypeAlias = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[CustomTool, Tag("custom")], Discriminator(type_or_function)
]


class NamedFields(RequestBody):
    drops_unknown_fields: ClassVar = True  # clients repeat the description and the schema or format here

    name: str


class NamedFunction(RequestBody):
    """`tool_choice` that requires a call of one function."""

    type: Literal["function"] = "function"
    function: NamedFields

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(RequestBody):
    """`tool_choice` that requires a call of one custom tool."""

    type: Literal["custom"]
    custom: NamedFields

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool: TypeAlias = Annotated[
    Annotated[NamedFunction, Tag("function")] | Annotated[NamedCustom, Tag("custom")], Discriminator(type_or_function)
]


class AllowedNames(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS, min_length=1)]


class AllowedTools(RequestBody):
    """`tool_choice` that offers only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames
