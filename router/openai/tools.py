"""The functions that a model may call, as fields of a chat's body.

The folder tool_grammars makes the grammars of their calls, and the parsers of the folder parsing find the calls in the
generated text.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.sampling_fields import RequestBody


class Function(RequestBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    accepted_values: ClassVar = {"strict": (False,)}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(RequestBody):
    drops_unknown_fields: ClassVar = True  # clients repeat the function's description and schema here

    name: str


class NamedTool(RequestBody):
    """`tool_choice` that requires a call of one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS, min_length=1)]


class AllowedTools(RequestBody):
    """`tool_choice` that offers only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions
