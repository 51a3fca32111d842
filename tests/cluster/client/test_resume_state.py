"""What a client holds of a stream that changed routers."""

from coatcheck.cluster.client.resume_state import ResumeState
from coatcheck.proto.stubs import coatcheck_pb2 as pb


def test_prompt_scores_come_in_parts_and_only_once() -> None:
    """Every part of a prompt's scores is taken, and after a resume only what had not come."""
    delivered = ResumeState(pb.GenerateRequest())

    def took(*ids: int) -> list[int]:
        part = pb.PromptLogprobs(tokens=[pb.TokenLogprob(token_id=i) for i in ids])
        event = delivered.record_event(pb.GenerateEvent(prompt_logprobs=part))
        return [token.token_id for token in event.prompt_logprobs.tokens] if event else []

    start = pb.GenerateEvent(started=pb.Started(seed=1))
    delivered.record_event(start)
    assert took(1, 2) == [1, 2] and took(3) == [3]
    assert delivered.record_event(start) is None
    assert took(1) == [] and took(2, 3, 4) == [4] and took(5) == [5]


def test_a_resume_has_the_newest_ticket() -> None:
    """Before the first event the request is sent as it is. A router that does not accept a ticket sends another one.
    One of an older version sends none, and the former ticket is kept for the router after it."""
    delivered = ResumeState(pb.GenerateRequest(text="a"))
    assert delivered.request() == pb.GenerateRequest(text="a")
    for ticket in (b"first", b"second", b""):
        delivered.record_event(pb.GenerateEvent(started=pb.Started(request_id="r", seed=1, resume_ticket=ticket)))
        assert delivered.request().resume_ticket == (ticket or b"second")


def test_a_ticket_in_a_delta_replaces_that_of_the_beginning() -> None:
    """The request has moved to a group of another kind before its first output."""
    delivered = ResumeState(pb.GenerateRequest())
    delivered.record_event(pb.GenerateEvent(started=pb.Started(request_id="r", seed=1, resume_ticket=b"first")))
    for ticket in (b"second", b""):
        delivered.record_event(pb.GenerateEvent(delta=pb.Delta(token_ids=[5], resume_ticket=ticket)))
        assert delivered.request().resume_ticket == b"second"


def test_a_ticket_that_a_router_does_not_know_is_forgotten() -> None:
    """Until a router sends another ticket. Before the first event the request is the caller's own."""
    delivered = ResumeState(pb.GenerateRequest(resume_ticket=b"own"))
    assert not delivered.forget_ticket() and delivered.request().resume_ticket == b"own"
    delivered.record_event(pb.GenerateEvent(started=pb.Started(resume_ticket=b"first")))
    assert delivered.forget_ticket() and not delivered.forget_ticket() and not delivered.request().resume_ticket
    delivered.record_event(pb.GenerateEvent(started=pb.Started(resume_ticket=b"second")))
    assert delivered.request().resume_ticket == b"second"
