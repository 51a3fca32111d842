"""PrefixReplication: one more group computes a prefix once the waits for the groups that hold it have cost as much."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.router.routing.prefix_replication import PrefixReplication
from coatcheck.router.routing.routing_cost import Candidate
from tests.examples import examples
from tests.router.routing.candidates import a_group, choose_group

BLOCK = 100
CHAIN = [bytes([place]) * 16 for place in range(10)]  # a prompt of 1,000 tokens
DICE = random.Random(0)


def send(replication: PrefixReplication, groups: list[Candidate]) -> str:
    """The group that a prompt of 1,000 tokens is sent to."""
    decision = replication.consider_copy(choose_group(groups, 1000, DICE), CHAIN, BLOCK)
    replication.check()
    return decision.group


def test_waits_pay_for_a_copy() -> None:
    """The holder makes each request wait 0.3 s. A copy costs 0.8 s and would serve every second request, so the sixth
    request pays the rest of the price, and the next copy has to be paid anew."""
    groups = [a_group("holder", device_tokens=800, queued_prefill_tokens=300), a_group("idle")]
    replication = PrefixReplication()
    assert [send(replication, groups) for _ in range(12)] == (["holder"] * 5 + ["idle"]) * 2


def test_a_holder_without_a_queue_keeps_its_prefix() -> None:
    """While the holder answers as soon as another copy would, no copy is made."""
    groups = [a_group("holder", device_tokens=800), a_group("idle"), a_group("queue", queued_prefill_tokens=500)]
    replication = PrefixReplication()
    assert {send(replication, groups) for _ in range(100)} == {"holder"}


def test_a_further_copy_is_worth_less() -> None:
    """A third copy would serve every third request, so it takes more requests to pay for it than the second."""
    waiting = {"device_tokens": 800, "queued_prefill_tokens": 310}
    one, two = (
        [a_group("a", **waiting), a_group("idle")],
        [a_group(name, **waiting) for name in "ab"] + [a_group("idle")],
    )
    paid = []
    for groups in (one, two):
        replication = PrefixReplication()
        paid.append(next(count for count in range(100) if send(replication, groups) == "idle"))
    assert paid == [5, 7]


def test_waits_for_one_prefix_pay_for_no_other() -> None:
    """Each prefix has its own account; a longer match is another prefix."""
    idle = a_group("idle")
    short = a_group("holder", device_tokens=700, queued_prefill_tokens=290)
    groups = [[short, idle], [short._replace(device_tokens=800), idle]]
    replication = PrefixReplication()
    sent = [send(replication, groups[turn % 2]) for turn in range(8)]
    assert sent == ["holder"] * 8


def test_a_copy_goes_to_the_group_that_would_answer_soonest() -> None:
    """Groups without room get no copy, and of the others the one with the shortest queue gets it."""
    holder = a_group("holder", device_tokens=800, queued_prefill_tokens=700)
    others = [a_group("full", has_room=False), a_group("long", queued_prefill_tokens=400), a_group("short")]
    others[2] = others[2]._replace(queued_prefill_tokens=150)
    replication = PrefixReplication()
    sent = [send(replication, [holder, *others]) for _ in range(6)]
    assert set(sent) == {"holder", "short"}


def test_the_explanation_says_that_a_copy_is_made() -> None:
    """The group of a copy is not the cheapest, and the decision says why."""
    groups = [a_group("holder", device_tokens=800, queued_prefill_tokens=790), a_group("idle")]
    replication = PrefixReplication()
    decisions = [replication.consider_copy(choose_group(groups, 1000, DICE), CHAIN, BLOCK) for _ in range(3)]
    assert [decision.makes_copy for decision in decisions] == [False, False, True]
    assert decisions[2].why.endswith("; it computes another copy of a prefix that is used often")


def test_accounts_are_bounded() -> None:
    """With more prefixes than accounts, the least recently used account is forgotten."""
    replication = PrefixReplication(max_prefixes=2)
    groups = [a_group("holder", device_tokens=100, queued_prefill_tokens=30), a_group("idle")]
    for prefix in (0, 1, 2, 0, 1, 2):
        chain = [bytes([prefix]) * 16]
        assert replication.consider_copy(choose_group(groups, 1000, DICE), chain, BLOCK).group == "holder"
        replication.check()


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 3000), st.booleans(), st.integers(0, 50)), min_size=1, max_size=5
    ),
    st.integers(1, 1500),
    st.integers(0, 20),
)
def test_any_group_of_a_review_could_serve(states: list[tuple[int, int, bool, int]], prompt: int, queued: int) -> None:
    """For any groups, the reviewed group is the chosen one or a group with room that holds less; and a copy never costs
    less than the choice."""
    groups = [
        a_group(f"g{place}", device_tokens=blocks * BLOCK, queued_prefill_tokens=tokens, has_room=room, streams=streams)
        for place, (blocks, tokens, room, streams) in enumerate(states)
    ]
    replication = PrefixReplication()
    for _ in range(5):
        decision = choose_group(groups, prompt, DICE, queued_in_router=queued)
        reviewed = replication.consider_copy(decision, CHAIN, BLOCK)
        replication.check()
        if reviewed.group != decision.group:
            assert reviewed.makes_copy and reviewed.chosen.has_room
            assert reviewed.chosen.cached_tokens < decision.chosen.cached_tokens
            assert reviewed.chosen.total_seconds >= decision.chosen.total_seconds
