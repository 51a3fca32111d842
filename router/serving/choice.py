"""Choice: one choice of a request, from token ids to the deltas that a client sees.

Owns its detokeniser and stop strings. It does not know groups or streams, and does not care how often the tokens
changed hands on the way.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from coatcheck.proto.stubs.coatcheck_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, Delta, FinishReason
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.text.detokenizer import Detokenizer
from coatcheck.router.text.stop_strings import StopStrings


class Choice:
    """Mutable, owned by one relay. `token_ids` is all that is delivered, `finish_reason` is set by the last of it."""

    __slots__ = ("_detokenizer", "_eos", "_fed", "_stops", "finish_reason", "index", "token_ids")

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        eos: AbstractSet[int],
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._eos = eos
        self._fed = False  # whether a token has come that the client did not bring

    def prime(self, token_ids: Sequence[int]) -> Delta | None:
        """Takes up where the client's tokens end; returns a last delta when they already hold a stop string."""
        count, _ = self._text_of(token_ids)
        self.token_ids += token_ids[:count]
        if self._hit is None:
            return None
        self.finish_reason = FINISH_REASON_STOP
        return Delta(choice=self.index, finish_reason=FINISH_REASON_STOP, stop=self._hit)

    def advance(self, output: SequenceOutput, delta: Delta) -> None:
        """Adds what a group sent to a delta of this choice. After the last, nothing is added."""
        if self.finish_reason:
            return
        token_ids: Sequence[int] = output.token_ids
        count, text = self._text_of(token_ids[:-1] if self._ends_with_eos(output) else token_ids)
        self._fed = self._fed or bool(token_ids)
        if self._hit is None:
            count = len(token_ids)
            if output.finish_reason and self._fed:  # what a client brought it has seen to the end
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
        """An end-of-sequence token that ends a choice is delivered, but it is not text."""
        return bool(output.finish_reason == FINISH_REASON_STOP and output.token_ids) and (
            output.HasField("stop_token_id") and output.stop_token_id in self._eos
        )

    def _text_of(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """How many of the tokens were used (fewer where a stop string is complete), and what may be shown."""
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
        return self._stops.feed(rest) + self._stops.flush()  # the rest may itself complete a stop string
