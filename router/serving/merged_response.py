"""MergedResponse: the events of a stream, merged into the one response of a call that does not stream."""

from collections.abc import Sequence

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, ToolCallDelta


class MergedResponse:
    """Call `add_event` for each event, in order, then `finish`."""

    def __init__(self) -> None:
        self._response = GenerateResponse()
        self._texts: dict[int, list[str]] = {}  # by choice
        self._reasoning: dict[int, list[str]] = {}

    def add_event(self, event: GenerateEvent) -> None:
        """Merges the next event. `event` is changed."""
        match event.WhichOneof("event"):
            case "started":
                self._response.started.CopyFrom(event.started)
            case "prompt_logprobs":
                self._response.prompt_logprobs.MergeFrom(event.prompt_logprobs)  # an event has a part of them
            case "delta":
                self._add_delta(event.delta)
            case "final":
                self._response.final.CopyFrom(event.final)

    def finish(self) -> GenerateResponse:
        """The response."""
        choices = self._response.choices
        for index, pieces in self._texts.items():
            choices[index].text = "".join(pieces)
        for index, pieces in self._reasoning.items():
            choices[index].reasoning = "".join(pieces)
        for choice in choices:
            if choice.tool_calls:
                calls = _join_calls(choice.tool_calls)
                del choice.tool_calls[:]
                choice.tool_calls.extend(calls)
        return self._response

    def _add_delta(self, delta: Delta) -> None:
        choices = self._response.choices
        while len(choices) <= delta.choice:
            choices.add(choice=len(choices))
        self._texts.setdefault(delta.choice, []).append(delta.text)
        if delta.reasoning:
            self._reasoning.setdefault(delta.choice, []).append(delta.reasoning)
        delta.ClearField("text")  # MergeFrom would replace the text, not append to it
        # Merged now, because copying millions of log-probabilities at the end takes 0.2 s.
        choices[delta.choice].MergeFrom(delta)


def _join_calls(pieces: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
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
