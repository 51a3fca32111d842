"""Choice: turns the token ids of one choice of a request into deltas for the client.

The text does not depend on how many groups the tokens come from.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from coatcheck.proto.stubs.coatcheck_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, Delta, FinishReason
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.text.detokenizer import Detokenizer


class Choice:
    """`token_ids`: all tokens that the client has. `finish_reason`: set once the choice has ended. `eos`: the
    end-of-sequence tokens of the present group."""

    __slots__ = ("_detokenizer", "_has_new_tokens", "_stops", "eos", "finish_reason", "index", "token_ids")

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        eos: AbstractSet[int],
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.eos = eos
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._has_new_tokens = False  # whether a group has sent a token that the client did not have

    def resume_from(self, token_ids: Sequence[int]) -> Delta | None:
        """Continues after the tokens that the client has. Returns a last delta if they contain a stop string."""
        count, _ = self._text_of(token_ids)
        self.token_ids += token_ids[:count]
        if self._hit is None:
            return None
        self.finish_reason = FINISH_REASON_STOP
        return Delta(choice=self.index, finish_reason=FINISH_REASON_STOP, stop=self._hit)

    def add_output(self, output: SequenceOutput, delta: Delta) -> None:
        """Adds a group's output to `delta`; adds nothing once the choice has ended."""
        if self.finish_reason:
            return
        token_ids: Sequence[int] = output.token_ids
        count, text = self._text_of(token_ids[:-1] if self._ends_with_eos(output) else token_ids)
        self._has_new_tokens = self._has_new_tokens or bool(token_ids)
        if self._hit is None:
            count = len(token_ids)
            if output.finish_reason and self._has_new_tokens:  # else the client has all of the text
                text += self._flush()
        self.token_ids += token_ids[:count]
        delta.token_ids.extend(token_ids[:count])
        if output.logprobs:
            delta.logprobs.extend(output.logprobs[:count])
        if text:
            delta.text += text
        if self._hit is not None:
            self._finish(delta, FINISH_REASON_STOP)
            delta.stop = self._hit
        elif output.finish_reason:
            self._finish(delta, output.finish_reason)
            if output.HasField("stop_token_id"):
                delta.stop_token_id = output.stop_token_id

    @property
    def _hit(self) -> str | None:
        return self._stops.hit if self._stops is not None else None

    def _finish(self, delta: Delta, reason: FinishReason) -> None:
        self.finish_reason = delta.finish_reason = reason

    def _ends_with_eos(self, output: SequenceOutput) -> bool:
        """Whether the last token is an end-of-sequence token: it is delivered, but is not text."""
        return bool(output.finish_reason == FINISH_REASON_STOP and output.token_ids) and (
            output.HasField("stop_token_id") and output.stop_token_id in self.eos
        )

    def _text_of(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """The number of tokens to deliver, fewer than all if a stop string is complete, and the text to show."""
        if self._stops is None:
            return len(token_ids), self._detokenizer.feed(token_ids)
        shown = []
        for count, token in enumerate(token_ids, 1):
            shown.append(self._stops.feed(self._detokenizer.feed((token,))))
            if self._stops.hit is not None:
                return count, "".join(shown)
        return len(token_ids), "".join(shown)

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.feed(rest) + self._stops.flush()  # the rest may complete a stop string


class StopStrings:
    """Ends a text before its first stop string, and holds back text that may be the beginning of one. `hit`: the stop
    string that ended the text, or None. `include`: keep the stop string in the text.

    The stop string that is complete first counts. Of two that are complete at the same character, the longer counts.
    The text returned so far depends only on the text fed so far and not on how it was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece of text; returns the text that can be shown now."""
        if self.hit is not None or not text:
            return ""
        buffer = self._held + text
        # The held text contains no whole stop string, so each match ends in the new text.
        ends = ((found + len(stop), -len(stop), stop) for stop in self._stops if (found := buffer.find(stop)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.hit = first
            self._held = ""
            return buffer[: end if self._include else end - len(self.hit)]
        kept = self._held_start(buffer)
        self._held = buffer[kept:]
        return buffer[:kept]

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _held_start(self, buffer: str) -> int:
        """Where the longest tail of `buffer` starts that may begin a stop string; len(buffer) if there is none."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
