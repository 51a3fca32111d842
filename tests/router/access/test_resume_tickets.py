"""A ticket admits the resume of one request of one tenant, a few times, for a day."""

import time

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, Resumed, SamplingParams
from coatcheck.router.access import resume_tickets
from coatcheck.router.access.resume_tickets import ResumeTickets, digest_request
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.config import RouterConfig

KEY = b"k" * 32
SEARCH = Tenant("search")
FIRST = GenerateRequest(text="a fox", sampling=SamplingParams(max_tokens=20, logit_bias={5: 1.0, 6: 2.0}))


def issue(first: GenerateRequest = FIRST, key: bytes = KEY, now: float = 1000.0) -> bytes:
    """The ticket for a request without id and seed, to which the router gives the id "r" and the seed 7."""
    return ResumeTickets(key, lambda: now).issue(digest_request(first), SEARCH, "r", 7)


def resume(ticket: bytes, first: GenerateRequest = FIRST) -> GenerateRequest:
    """The request with which a client resumes."""
    message = GenerateRequest()
    message.CopyFrom(first)
    message.request_id, message.sampling.seed, message.resume_ticket = "r", 7, ticket
    message.resume.append(Resumed(token_ids=[1, 2, 3]))
    return message


def is_accepted(message: GenerateRequest, tenant: Tenant = SEARCH, key: bytes = KEY, now: float = 1000.0) -> bool:
    """Whether the ticket of `message` admits it at a router that has redeemed no ticket before."""
    return ResumeTickets(key, lambda: now).redeem(message, tenant) == digest_request(message)


@pytest.mark.parametrize(
    "first",
    [FIRST, GenerateRequest(text="a"), GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="hi")]))],
    ids=["sampling", "no sampling", "chat"],
)
def test_another_router_with_the_same_key_accepts_a_ticket(first: GenerateRequest) -> None:
    """The resume has more fields than the first request: its id, the seed, the tokens and the ticket."""
    assert is_accepted(resume(issue(first), first))


def test_a_ticket_is_of_no_use_for_anything_else() -> None:
    """Not for another prompt, another field, another id or seed, another tenant, nor at routers with another key."""
    message = resume(issue())
    assert is_accepted(message)
    assert not is_accepted(message, Tenant("other"))
    assert not is_accepted(message, key=b"another key")
    assert not is_accepted(message, key=b"") and not is_accepted(resume(issue(key=b"")), key=b"")
    for change in (
        GenerateRequest(text="another fox"),
        GenerateRequest(request_id="s"),
        GenerateRequest(priority=-1),
        GenerateRequest(sampling=SamplingParams(seed=8)),
        GenerateRequest(sampling=SamplingParams(max_tokens=21)),
        GenerateRequest(sampling=SamplingParams(logit_bias={5: 3.0})),
    ):
        changed = GenerateRequest()
        changed.CopyFrom(message)
        changed.MergeFrom(change)
        assert not is_accepted(changed), change


def test_made_up_tickets_are_refused() -> None:
    """A ticket of any length, or with another expiry, is refused and not an error."""
    ticket = issue()
    for other in (b"", b"x", ticket[:8], ticket[:-1], ticket + b"x", bytes(len(ticket)), b"\xff" * 8 + ticket[8:]):
        assert not is_accepted(resume(other))


def test_a_forged_ticket_is_refused_without_reading_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """`redeem` reads only the ticket, the id and the seed. It hashes no id that is longer than any admitted one: 30 MB
    would block the event loop for half a second."""
    tickets = ResumeTickets(KEY)
    monkeypatch.setattr(tickets, "_authenticate", None)  # a call would fail
    message = resume(bytes(72))
    message.request_id = "r" * 257
    assert tickets.redeem(message, SEARCH) == tickets.redeem(resume(b"short"), SEARCH) == b""


def test_a_ticket_has_the_kind_of_group() -> None:
    """The kind can be replaced, and does not change whom the ticket admits. A ticket of an older router has none."""
    tickets = ResumeTickets(KEY, lambda: 1000.0)
    old = issue()
    ticket = tickets.add_kind(old, b"a" * 16)
    assert tickets.read_kind(old) == b"" and tickets.read_kind(ticket) == b"a" * 16
    assert is_accepted(resume(old)) and is_accepted(resume(ticket))
    other = tickets.add_kind(ticket, b"b" * 16)
    assert tickets.read_kind(other) == b"b" * 16 and len(other) == len(ticket)
    redeemed = [bool(tickets.redeem(resume(one), SEARCH)) for one in (ticket, other) * 9]
    assert redeemed == [True] * 16 + [False] * 2, "both count as one ticket"


def test_a_made_up_kind_is_none() -> None:
    """A kind that no router of the cluster has written would make the request wait for a group that does not exist."""
    ticket = ResumeTickets(KEY).add_kind(issue(), b"a" * 16)
    for other in (
        ticket[:72] + b"b" * 16 + ticket[88:],
        ticket[:-1] + b"x",
        ticket[:-1],
        ticket + b"x",
        b"",
        b"x" * 104,
    ):
        assert ResumeTickets(KEY).read_kind(other) == b""
    assert ResumeTickets(b"another").read_kind(ticket) == b""


def test_a_ticket_expires() -> None:
    """A ticket is accepted for a day. Resumes do not prolong that."""
    message = resume(issue(now=1000.0))
    assert is_accepted(message, now=1000.0 + 86_400)
    assert not is_accepted(message, now=1001.0 + 86_400)


def test_copies_of_a_ticket_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One router redeems a ticket 16 times, and counts for a bounded number of tickets."""
    tickets = ResumeTickets(KEY)
    messages = []
    for prompt in "abc":
        first = GenerateRequest(text=prompt)
        digest = digest_request(first)
        message = resume(tickets.issue(digest, SEARCH, "r", 7), first)
        messages.append((message, digest))
    redeemed = [tickets.redeem(messages[0][0], SEARCH) for _ in range(17)]
    assert redeemed == [messages[0][1]] * 16 + [b""]
    monkeypatch.setattr(resume_tickets, "_MAX_TICKETS", 2)
    assert tickets.redeem(messages[1][0], SEARCH) and not tickets.redeem(messages[0][0], SEARCH)
    assert tickets.redeem(messages[2][0], SEARCH) and len(tickets._resumes) == 2


def test_a_ticket_with_other_messages_is_bounded_too() -> None:
    """A router reads at most 16 messages because of one ticket, also if none of them is the ticket's own."""
    tickets = ResumeTickets(KEY)
    message = resume(issue(now=time.time()))
    message.text = "another fox"
    redeemed = [tickets.redeem(message, SEARCH) for _ in range(17)]
    assert redeemed == [digest_request(FIRST)] * 16 + [b""]


def test_the_key_is_not_shown() -> None:
    """A log line, an error or a debugger that shows the settings of a router does not show the key."""
    assert "kkk" not in repr(RouterConfig("m", resume_key=KEY))
