"""`difference` of bench/failure_cases/chaos_load.py finds a changed answer."""

import pytest

from coatcheck.bench.failure_cases.chaos_load import difference
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.stubs import coatcheck_pb2 as pb


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "text"])
def test_a_change_is_seen(name: str) -> None:
    """Two answers that differ in one token, one log-probability or one letter are not equal."""

    def answer(**changed: object) -> GenerationResult:
        told = {"text": "ab", "token_ids": [5], "logprobs": [pb.TokenLogprob(token_id=5, logprob=-1.0)], **changed}
        made = GenerationResult(0.0)
        made.add(pb.GenerateEvent(delta=pb.Delta(choice=0, **told)), 0.0)  # type: ignore[arg-type]
        return made

    other = {"token_ids": [6], "logprobs": [pb.TokenLogprob(token_id=5, logprob=-1.001)], "text": "ac"}[name]
    assert difference(answer(), answer()) == ""
    assert difference(answer(), answer(**{name: other}))
