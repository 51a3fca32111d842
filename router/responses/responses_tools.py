"""The tools of a /v1/responses body: functions and custom tools, alone or in a namespace, and hosted tools, which are
left out."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from coatcheck.proto.errors import InvalidParameter
from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.sampling_fields import IGNORED_FIELDS, RequestBody
from coatcheck.router.openai.tools import MAX_NAME, AnyInput, GrammarDefinition, ToolName

_DIRECT: Final = (["direct"],)  # the model calls the tool itself, not a program that it has written


class FunctionTool(RequestBody):
    """A function that the client runs. `output_schema`, which describes its results, has no effect."""

    accepted_values: ClassVar = {"defer_loading": (False,), "allowed_callers": _DIRECT}
    ignored_fields: ClassVar = IGNORED_FIELDS | {"output_schema"}

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarFormat(GrammarDefinition):
    type: Literal["grammar"]


class CustomToolParam(RequestBody):
    """A tool that the client runs, whose input is a text. A grammar may constrain the text."""

    accepted_values: ClassVar = {"defer_loading": (False,), "allowed_callers": _DIRECT}

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[AnyInput | GrammarFormat, Field(discriminator="type")] | None = None


ClientTool = Annotated[FunctionTool | CustomToolParam, Field(discriminator="type")]


class NamespaceTool(RequestBody):
    """Tools that the client groups under a name, as Codex groups those of an MCP server. The model sees each tool as
    `namespace__name`, as with vLLM. Calls in the response have `namespace` and `name` as two fields."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class HostedTool(RequestBody):
    """A tool that OpenAI's servers run. Agents send it with every request, beside their functions. The router leaves it
    out of the prompt and of the response's `tools`."""

    drops_unknown_fields: ClassVar = True

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
    ]


ResponsesTool = Annotated[FunctionTool | CustomToolParam | NamespaceTool | HostedTool, Field(discriminator="type")]


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function or custom tool as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


def to_chat_tools(tools: Sequence[ResponsesTool]) -> list[dict[str, Any]]:
    """The tools in the form of /v1/chat/completions. Raises InvalidParameter if all tools are hosted ones, or if the
    name of a tool in a namespace is too long."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        match tool:
            case FunctionTool() | CustomToolParam():
                found.append(_chat_tool(tool, tool.name))
            case NamespaceTool():
                for at, one in enumerate(tool.tools):
                    name = flat_name(tool.name, one.name)
                    if len(name) > MAX_NAME:
                        raise InvalidParameter(
                            f"tools.{index}.tools.{at}.name",
                            f"has {len(name)} characters as the model sees it, {name[:20]}...; the "
                            f"maximum is {MAX_NAME}",
                        )
                    found.append(_chat_tool(one, name))
    if not found and (hosted := [(n, tool.type) for n, tool in enumerate(tools) if isinstance(tool, HostedTool)]):
        index, kind = hosted[0]
        raise InvalidParameter(
            f"tools.{index}.type", f"is {kind!r}, which only OpenAI's servers run; give functions or custom tools"
        )
    return found


class ToolField(NamedTuple):
    """The place of a tool in the body, and the field that constrains its calls."""

    tool: str
    schema: str


def tool_fields(tools: Sequence[ResponsesTool]) -> list[ToolField]:
    """The ToolField of each tool of to_chat_tools."""
    found: list[tuple[str, FunctionTool | CustomToolParam]] = []
    for index, tool in enumerate(tools):
        match tool:
            case FunctionTool() | CustomToolParam():
                found.append((f"tools[{index}]", tool))
            case NamespaceTool():
                found += [(f"tools[{index}].tools[{at}]", one) for at, one in enumerate(tool.tools)]
    return [ToolField(field, f"{field}.{_schema_field(tool)}") for field, tool in found]


def names_in_namespaces(tools: Sequence[ResponsesTool]) -> dict[str, tuple[str, str]]:
    """For each tool in a namespace: the name that the model sees -> (namespace, name)."""
    return {
        flat_name(tool.name, one.name): (tool.name, one.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for one in tool.tools
    }


def _schema_field(tool: FunctionTool | CustomToolParam) -> str:
    return "parameters" if isinstance(tool, FunctionTool) else "format"


def _chat_tool(tool: FunctionTool | CustomToolParam, name: str) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        function = tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": {"name": name, **function}}
    custom: dict[str, Any] = {"name": name, "description": tool.description}
    if isinstance(form := tool.format, GrammarFormat):
        custom["format"] = {"type": form.type, "grammar": form.model_dump(include={"syntax", "definition"})}
    return {"type": "custom", "custom": custom}
