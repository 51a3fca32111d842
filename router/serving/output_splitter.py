"""OutputSplitter: moves reasoning and tool calls out of the text of a gRPC response's deltas."""

from collections.abc import Callable, Mapping, Sequence

from coatcheck.proto.stubs.coatcheck_pb2 import Chat, Delta, ToolCallDelta
from coatcheck.router.parsing import parts
from coatcheck.router.parsing.output_parser import OutputParser
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.serving.tool_choice import make_plan
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
        self._plan = make_plan(chat, planner)
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
