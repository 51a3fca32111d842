"""UnclosedReasoning: finds the calls of a model that calls tools without having ended its reasoning.

Kimi K2, Qwen and others sometimes leave out the end marker of the reasoning before a call. So text in reasoning that
may be a call is held back. If the end marker comes after it, the text is reasoning. If the answer ends first, it is a
call.
"""

from collections.abc import Callable, Sequence

from coatcheck.router.parsing.parts import Content, Part, Reasoning, ToolCallDelta
from coatcheck.router.parsing.tool_parser import MarkedText, ToolParser


class UnclosedReasoning:
    """The reasoning of one choice. `markers`: what calls begin with. `make_parser`: makes the parser that decides
    whether held text is a call."""

    def __init__(self, markers: Sequence[str], make_parser: Callable[[], ToolParser | None]) -> None:
        self._marked = MarkedText(markers)
        self._make_parser = make_parser
        self._held = ""
        self._marker = ""  # with which `_held` begins, if that may be a call
        self._parser: ToolParser | None = None  # of `_held`
        self._num_parsed = 0  # characters of `_held` that the parser has
        self._is_call = False

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of reasoning; returns the text that is certainly no call."""
        self._held += text
        parts: list[Part] = []
        while True:
            if not self._marker:
                found = self._marked.find(self._held)
                count = self._marked.count_certain(self._held) if found is None else found[0]
                parts.append(self._release(count))
                if found is None:
                    return parts
                self._marker, self._parser, self._num_parsed = found[1], self._make_parser(), 0
            if self._may_be_call():
                return parts
            parts.append(self._release(len(self._marker)))
            self._marker = ""

    def release_text(self) -> list[Part]:
        """Returns the held text as reasoning. Called when the reasoning has ended."""
        self._marker = ""
        return [self._release(len(self._held))]

    def calls_at_end(self) -> str:
        """The text of the calls in the held text, once the answer has ended; "" if there are none."""
        if self._parser is None or not self._marker:
            return ""
        parts = self._parser.finish()
        is_call = self._is_call or any(isinstance(part, ToolCallDelta) for part in parts)
        return self._held if is_call else ""

    def _may_be_call(self) -> bool:
        """Whether the held text is a call, or may become one."""
        if self._parser is None:
            return False
        parts = self._parser.feed(self._held[self._num_parsed :])
        self._num_parsed = len(self._held)
        for part in parts if not self._is_call else ():
            if isinstance(part, Content) and part.text.strip():
                return False
            if isinstance(part, ToolCallDelta):
                self._is_call = True
                break
        return True

    def _release(self, count: int) -> Part:
        text, self._held = self._held[:count], self._held[count:]
        return Reasoning(text)
