"""apply_policy(): least-loaded and round-robin choose among the groups with room, whatever the cost."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.router.config import RouterConfig
from coatcheck.router.routing.routing_cost import Candidate, Candidates, Decision
from coatcheck.router.routing.routing_policy import apply_policy
from tests.examples import examples
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter
from tests.router.routing.candidates import CANDIDATES, a_group, choose_group
from tests.router.routing.reported_prefix import PROMPT, blocks

DICE = random.Random(0)
BASELINES = ("least-loaded", "round-robin")


def decide(policy: str, groups: list[Candidate], last: str = "") -> Decision:
    """The decision of a policy for a prompt of 1,000 tokens."""
    return apply_policy(policy, choose_group(groups, 1000, DICE), Candidates.of(groups), last, DICE)


def test_least_loaded_counts_requests_and_not_tokens() -> None:
    """The group with the fewest running and waiting sequences is chosen, although others hold the prompt or have a
    shorter queue; groups with equally few share equally."""
    holder = a_group("holder", streams=4, device_tokens=900)
    groups = [holder, a_group("a", streams=3, queued_prefill_tokens=9000), a_group("b", streams=3)]
    counts = Counter(decide("least-loaded", groups).group for _ in range(1000))
    assert counts.keys() == {"a", "b"} and 400 < counts["a"] < 600


def test_round_robin_takes_each_group_in_turn() -> None:
    """After each group comes the next by name, and after the last the first, also while groups leave and join."""
    groups, last, sent = [a_group(name) for name in "cab"], "a", ""
    for present in ("cab", "cab", "cab", "ac", "ac", "abcd", "abcd"):
        last = decide("round-robin", [group for group in [*groups, a_group("d")] if group.group in present], last).group
        sent += last
    assert sent == "bcacabc"


def test_the_first_turn_is_at_random() -> None:
    """Routers that start together begin with different groups."""
    assert {decide("round-robin", [a_group(name) for name in "abc"]).group for _ in range(100)} == set("abc")


@pytest.mark.parametrize("policy", BASELINES)
def test_a_group_without_room_is_chosen_only_if_none_has_room(policy: str) -> None:
    """As for the cost, groups without room are left out; a group that holds the prompt is no exception."""
    full = a_group("a", has_room=False, device_tokens=900)
    assert decide(policy, [full, a_group("b", streams=9)], "b").group == "b"
    assert decide(policy, [full, a_group("b", streams=9, has_room=False)], "b").group == "a"


def test_the_explanation_names_the_policy() -> None:
    """A baseline says that the cost did not decide; the costs stay those of all groups."""
    groups = [a_group("cheap", device_tokens=900, streams=1), a_group("dear")]
    assert "least-loaded" not in decide("prefix-aware", groups).why
    told = decide("least-loaded", groups)
    assert told.policy == "least-loaded" and told.why.startswith("dear: ") and len(told.costs) == 2
    assert told.why.endswith("; chosen by --routing least-loaded, whatever the cost")


@settings(max_examples=examples(50))
@given(CANDIDATES)
def test_the_default_changes_nothing(groups: list[Candidate]) -> None:
    """prefix-aware is the decision by cost itself. A baseline has the same costs, and a group with room if any has."""
    decision = choose_group(groups, 1000, DICE)
    assert apply_policy("prefix-aware", decision, Candidates.of(groups), "a", DICE) is decision
    for policy in BASELINES:
        chosen = apply_policy(policy, decision, Candidates.of(groups), "a", DICE)
        assert chosen.costs == decision.costs
        assert chosen.chosen.has_room or not any(group.has_room for group in groups)


def ask() -> GenerateRequest:
    """A request for the prompt whose blocks are `blocks()`."""
    return GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=1, seed=1))


async def start(start_router: StartRouter, policy: str) -> RouterUnderTest:
    """A router with three groups, of which "b" holds the prompt."""
    holder = FakeGroup("b")
    holder.blocks = blocks()
    router = await start_router(FakeGroup("a"), holder, FakeGroup("c"), routing=policy)
    while router.server.groups.index.entries != 10:
        await router.admin.Status(StatusRequest())
    return router


async def test_a_router_sends_in_turn(start_router: StartRouter) -> None:
    """With round-robin six requests make two rounds over the groups; what a dry run names comes next, and takes no
    turn; status and answer name the policy."""
    router = await start(start_router, "round-robin")
    sent, told = [], []
    for _ in range(6):
        answer = await router.generation.Generate(ask())
        sent.append(answer.final.group)
        told.append((await router.admin.Explain(ask())).group)
    assert sorted(sent[:3]) == ["a", "b", "c"] and sent[3:] == sent[:3] and told[:5] == sent[1:]
    assert "round-robin" in answer.final.routed_by
    assert (await router.admin.Status(StatusRequest())).routing == "round-robin"
    assert (await router.admin.Explain(ask())).routing == "round-robin"


async def test_a_router_sends_to_the_fewest_requests(start_router: StartRouter) -> None:
    """With least-loaded three requests that stay open take a group each, though one group holds their prompt."""
    router = await start(start_router, "least-loaded")
    for group in router.groups:
        group.hold_after = 0
    calls = [router.generation.GenerateStream(ask()) for _ in range(3)]
    started = [(await call.read()).started.group for call in calls]
    assert sorted(started) == ["a", "b", "c"]
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("policy", BASELINES)
async def test_a_lost_group_loses_no_request(start_router: StartRouter, policy: str) -> None:
    """A stream whose group is lost continues on another group, as with prefix-aware routing."""
    first, second = FakeGroup("a", hold_after=1), FakeGroup("b", hold_after=1)
    router = await start_router(first, second, routing=policy)
    request = ask()
    request.sampling.max_tokens = 4
    call = router.generation.GenerateStream(request).__aiter__()
    events = [await anext(call), await anext(call)]
    group = first if events[0].started.group == "a" else second
    (second if group is first else first).go()
    await group.kill()
    events += [event async for event in call]
    assert events[-1].final.moves == 1 and events[-1].final.usage.completion_tokens == 4


def test_an_unknown_policy_is_refused() -> None:
    """The error has the value and the names that exist."""
    with pytest.raises(InvalidConfig, match="routing is 'random'; it must be prefix-aware, least-loaded, round-robin"):
        RouterConfig("tiny", routing="random")  # type: ignore[arg-type]  # on purpose
