"""The tools of a /v1/responses body: functions, alone or in a namespace, and hosted tools, which are left out."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coatcheck.proto.errors import InvalidParameter
from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.sampling_fields import RequestBody

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionTool(RequestBody):
    """A function that the client runs."""

    accepted_values: ClassVar = {"defer_loading": (False,)}

    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(RequestBody):
    """Functions that the client groups under a name, as Codex groups those of an MCP server. The model sees each
    function as `namespace__function`, as with vLLM. Calls in the response have `namespace` and `name` as two fields."""

    type: Literal["namespace"]
    name: _Name
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


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


AnyTool = Annotated[FunctionTool | NamespaceTool | HostedTool, Field(discriminator="type")]


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


def to_chat_tools(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """The functions in the form of /v1/chat/completions. Raises InvalidParameter if all tools are hosted ones."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        match tool:
            case FunctionTool():
                found.append(_chat_function(tool, tool.name))
            case NamespaceTool():
                found += [_chat_function(one, flat_name(tool.name, one.name)) for one in tool.tools]
    if not found and (hosted := [(n, tool.type) for n, tool in enumerate(tools) if isinstance(tool, HostedTool)]):
        index, kind = hosted[0]
        raise InvalidParameter(f"tools.{index}.type", f"is {kind!r}, which only OpenAI's servers run; give functions")
    return found


def names_in_namespaces(tools: Sequence[AnyTool]) -> dict[str, tuple[str, str]]:
    """For each function in a namespace: the name that the model sees -> (namespace, name)."""
    return {
        flat_name(tool.name, one.name): (tool.name, one.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for one in tool.tools
    }


def _chat_function(tool: FunctionTool, name: str) -> dict[str, Any]:
    function = tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": {"name": name, **function}}
