"""OutputSplitter: moves reasoning and tool calls out of the text of a gRPC response's deltas."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import Chat, Delta, ToolCallDelta
from coatcheck.router.parsing import parts
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.text.detokenizer import Detokenizer


class OutputSplitter:
    """The parsers of the choices of one request."""

    def __init__(
        self,
        chat: Chat,
        planner: OutputPlanner,
        resumed: Mapping[int, Sequence[int]],
        make_detokenizer: Callable[[], Detokenizer],
    ) -> None:
        """`resumed`: output tokens by choice whose deltas the client has. `chat` must have been rendered before."""
        begins_message = not chat.continue_final_message and (
            chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
        )
        arguments = json.loads(chat.template_arguments or "{}")
        self._plan = ParsingPlan(
            planner.output_format,
            planner.reasoning_start(arguments, begins_message=begins_message),
            tool_mode="auto" if chat.tools else "none",
            schemas=_schemas(chat.tools),
        )
        self._parsers: dict[int, OutputParser] = {}
        for choice, token_ids in resumed.items():
            self._parser(choice).feed(make_detokenizer().feed(token_ids))

    def split(self, delta: Delta) -> None:
        """Replaces the text of `delta` by what is certain now of its content, reasoning and tool calls."""
        found = self._parser(delta.choice).feed_delta(delta.text, is_last=bool(delta.finish_reason))
        delta.ClearField("text")
        for part in found:
            match part:
                case parts.Content(text):
                    delta.text += text
                case parts.Reasoning(text):
                    delta.reasoning += text
                case parts.ToolCallDelta(index, arguments, name, call_id):
                    delta.tool_calls.append(ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments))

    def _parser(self, choice: int) -> OutputParser:
        return self._parsers.setdefault(choice, OutputParser(self._plan))


def join_calls(pieces: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The tool calls of a choice, each whole."""
    calls: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, piece)
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        ToolCallDelta(index=index, id=call.id, name=call.name, arguments="".join(arguments[index]))
        for index, call in calls.items()
    ]


def _schemas(tools: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The schema of each function's parameters. A tool in another form than OpenAI's has none."""
    schemas: dict[str, dict[str, Any]] = {}
    for text in tools:
        tool = json.loads(text)
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return schemas
