"""How a relay divides outputs, so that a client that reads late does not hold the event loop."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob, TopLogprob
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.serving.relay import MAX_LOGPROBS_PER_TURN, logprob_portions

LOGPROB = TokenLogprob(top=[TopLogprob()] * 19)  # one sampled token with 19 alternatives


@given(st.lists(st.integers(0, 300), max_size=40))
def test_portions_are_bounded_and_complete(tokens: list[int]) -> None:
    """No output is lost or reordered; a portion exceeds the bound only if it is one output."""
    outputs = [SequenceOutput(id=index, logprobs=[LOGPROB] * count) for index, count in enumerate(tokens)]
    portions = list(logprob_portions(outputs))
    assert [output for portion in portions for output in portion] == outputs
    for portion in portions:
        assert len(portion) == 1 or 20 * sum(len(output.logprobs) for output in portion) <= MAX_LOGPROBS_PER_TURN
