"""choose_group(): a gate excludes groups, and of the others the cheapest wins. One scenario for each term."""

import random
from collections import Counter

import pytest

from coatcheck.router.routing.routing_cost import Candidate, Decision
from tests.router.routing.candidates import a_group, choose_group

DICE = random.Random(0)

# A prompt of 1,000 tokens, which a group computes in 1 s: the groups, and the one that it is sent to.
SCENARIOS: dict[str, tuple[list[Candidate], str]] = {
    "a cached prefix beats an idle group": ([a_group("holder", device_tokens=800), a_group("idle")], "holder"),
    "an idle group beats a queue longer than the prefix saves": (
        [a_group("holder", device_tokens=800, queued_prefill_tokens=900), a_group("idle")],
        "idle",
    ),
    "the longer prefix of two wins": (
        [a_group("short", device_tokens=300), a_group("long", device_tokens=600)],
        "long",
    ),
    "a prefix in host memory is worth its prefill minus the copy": (
        [a_group("host", host_tokens=800, restore_tokens_per_second=8000.0), a_group("device", device_tokens=600)],
        "host",
    ),
    "a prompt that was just sent counts as cached": ([a_group("sent", expected_tokens=800), a_group("idle")], "sent"),
    "free blocks beat blocks in use": ([a_group("free"), a_group("full", free_tokens=0)], "free"),
    "few streams beat many": ([a_group("many", streams=100), a_group("few", streams=1)], "few"),
    "short steps beat long ones": ([a_group("slow", step_seconds=0.2), a_group("fast", step_seconds=0.02)], "fast"),
    "a faster group takes a longer queue": (
        [
            a_group("fast", prefill_tokens_per_second=4000.0, busy_share=0.5, queued_prefill_tokens=500),
            a_group("slow", prefill_tokens_per_second=500.0, busy_share=0.5),
        ],
        "fast",
    ),
    "room gate: a full group that holds no more is excluded": (
        [a_group("full", has_room=False), a_group("room", queued_prefill_tokens=500)],
        "room",
    ),
    "room gate: a full group that holds more is compared": (
        [a_group("full", has_room=False, device_tokens=900), a_group("room")],
        "full",
    ),
    "room gate: it is open while no group has room": (
        [a_group("long", has_room=False, queued_prefill_tokens=900), a_group("short", has_room=False)],
        "short",
    ),
    "an idle group beats a queue longer than the whole prompt": (
        [
            a_group("holder", busy_share=0.9, device_tokens=1000, queued_prefill_tokens=1100),
            a_group("idle", busy_share=0.9),
        ],
        "idle",
    ),
    "a queue as long as what the prefix saves beats the same elsewhere": (
        [
            a_group("holder", busy_share=0.9, device_tokens=1000, queued_prefill_tokens=1100),
            a_group("other", busy_share=0.9, queued_prefill_tokens=200),
        ],
        "holder",
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_which_group_is_chosen(name: str) -> None:
    """Each scenario has one answer, in whatever order the groups come."""
    groups, expected = SCENARIOS[name]
    assert choose_group(groups, 1000, DICE).group == choose_group(groups[::-1], 1000, DICE).group == expected


def test_the_room_gate_is_a_threshold_and_costs_are_not() -> None:
    """At the gate the choice changes although no cost changes by more than a little; `why` says which group a gate has
    excluded."""
    holder = a_group("holder", busy_share=0.9, device_tokens=1000)
    other = a_group("other", busy_share=0.9, device_tokens=1000, queued_prefill_tokens=100)
    before = choose_group([holder, other], 1000, DICE)
    after = choose_group([holder._replace(has_room=False), other], 1000, DICE)
    assert (before.group, after.group) == ("holder", "other")
    excluded = next(cost for cost in after.costs if cost.group == "holder")
    assert before.chosen.total_seconds == excluded.total_seconds < after.chosen.total_seconds
    assert after.why.endswith("; cheaper, but without room: holder")


def test_one_long_queue_does_not_make_idle_groups_look_expensive() -> None:
    """With 1,000 requests (50 s) queued at the group that holds the prompt, an idle group computes it in 0.46 s."""
    rates = {"prefill_tokens_per_second": 10_000.0, "free_tokens": 1_000_000}
    holder = a_group("g0", queued_prefill_tokens=500_000, device_tokens=4096, busy_share=1.0, **rates)
    idle = [a_group(f"g{place}", **rates) for place in range(1, 8)]
    decision = choose_group([holder, *idle], 4596, DICE)
    assert decision.group != "g0" and decision.chosen.delay_seconds < 1.0
    busier = holder._replace(queued_prefill_tokens=1000)
    assert choose_group([busier, *idle], 4596, DICE).group == "g0"


def test_an_idle_group_that_was_busy_lately_takes_what_would_queue_too_long() -> None:
    """The idle groups were as busy as the holder until now: a queue that is longer than the prompt still sends the
    request to an idle group. Once requests wait in the router, to compute the prompt again would delay them, and the
    request waits."""
    rates = {"prefill_tokens_per_second": 10_000.0, "free_tokens": 1_000_000, "busy_share": 0.9}
    holder = a_group("g0", queued_prefill_tokens=10_000, device_tokens=4096, **rates)
    others = [a_group(f"g{place}", **rates) for place in range(1, 8)]
    decision = choose_group([holder, *others], 4596, DICE)
    assert decision.group != "g0" and decision.chosen.delay_seconds == 0
    assert choose_group([holder, *others], 4596, DICE, queued_in_router=16).group == "g0"


def test_ties_are_broken_at_random() -> None:
    """Equal groups are chosen equally often."""
    rng = random.Random(1)
    counts = Counter(choose_group([Candidate(name) for name in "abcd"], 100, rng).group for _ in range(4000))
    assert set(counts) == set("abcd") and all(900 < count < 1100 for count in counts.values())


def test_no_term_is_printed_below_zero() -> None:
    """A group with free blocks evicts nothing: the term is 0, not -0, which `explain` would print as "-0.000"."""
    (cost,) = choose_group([a_group("free")], 1000, DICE).costs
    assert "-" not in f"{cost.eviction_seconds:.3f}"


def test_a_session_breaks_ties_and_nothing_else() -> None:
    """Of equal groups, one session always uses the same, and many sessions use all. A cheaper group wins over the
    session's."""
    equal = [a_group(name) for name in "abcd"]
    homes = {f"s{n}": {choose_group(equal, 100, DICE, session=f"s{n}").group for _ in range(5)} for n in range(40)}
    assert all(len(groups) == 1 for groups in homes.values())
    assert set.union(*homes.values()) == set("abcd")
    (home,) = homes["s0"]
    busy = [group._replace(queued_prefill_tokens=1) if group.group == home else group for group in equal]
    assert choose_group(busy, 100, DICE, session="s0").group != home


def test_a_cached_prefix_wins_until_the_queue_outweighs_it() -> None:
    """While no request waits, a cached prefix is worth exactly the prefill that it saves."""
    holder, idle = a_group("holder", device_tokens=800), a_group("idle")
    assert choose_group([holder, idle], 1000, DICE).group == "holder"
    assert choose_group([holder._replace(queued_prefill_tokens=799), idle], 1000, DICE).group == "holder"
    assert choose_group([holder._replace(queued_prefill_tokens=801), idle], 1000, DICE).group == "idle"


def test_expected_tokens_count_as_cached() -> None:
    """A prefix that the group computes for an earlier prompt saves as much as a cached one."""
    coming = a_group("coming", expected_tokens=800)
    assert choose_group([a_group("idle"), coming], 1000, DICE).group == "coming"


def test_work_costs_more_when_others_wait() -> None:
    """Work delays the requests that wait in the router too, so the more wait, the more cached tokens are worth."""
    holder = a_group("holder", device_tokens=800, queued_prefill_tokens=2000)
    other = a_group("other", queued_prefill_tokens=1000)
    assert choose_group([holder, other], 1000, DICE).group == "other"
    assert choose_group([holder, other], 1000, DICE, queued_in_router=2).group == "holder"


def test_busy_groups_expect_more_to_come() -> None:
    """The same queues weigh more while the groups are busier."""

    def delay(busy: float) -> float:
        decision = choose_group([a_group("a", busy_share=busy)], 1000, DICE, queued_in_router=1)
        return decision.chosen.delay_seconds

    assert 0 < delay(0.0) < delay(0.5) < delay(0.9) < delay(1.0) < float("inf")


def test_restoring_costs_its_bandwidth() -> None:
    """A prefix on the host is worth its prefill less the copy; a slow copy is worth less than an idle group."""
    nothing = a_group("nothing", queued_prefill_tokens=100)
    fast = a_group("host", host_tokens=800, restore_tokens_per_second=100_000.0)
    assert choose_group([nothing, fast], 1000, DICE).group == "host"
    assert choose_group([nothing, fast._replace(restore_tokens_per_second=800.0)], 1000, DICE).group == "nothing"
    unmeasured = choose_group([fast._replace(restore_tokens_per_second=0.0)], 1000, DICE).chosen
    assert 0 < unmeasured.restore_seconds < 0.8


def test_evicting_blocks_in_use_costs_their_prefill() -> None:
    """A group with free or cached blocks is cheaper than one that must take blocks from running sequences, which have
    to compute them again."""
    free, full = a_group("free"), a_group("full", free_tokens=0, evictable_tokens=100_000)
    used = a_group("used", free_tokens=0)
    costs = {cost.group: cost for cost in choose_group([free, full, used], 1000, DICE).costs}
    assert [costs[name].eviction_seconds for name in ("free", "full", "used")] == [0.0, 0.0, 1.0]
    half = a_group("half", free_tokens=1500, queued_prefill_tokens=1000)
    assert choose_group([half], 1000, DICE).chosen.eviction_seconds == 0.5, "the queue takes its room first"


def test_a_new_prompt_waits_for_the_step_that_runs() -> None:
    """A group that decodes is dearer by one step than an idle group. Idle groups differ by what they hold, even if one
    has measured longer steps: 30 cached tokens weigh more than a step of 1 s that does not run."""
    idle = a_group("idle", step_seconds=0.02)
    decoding = a_group("decoding", step_seconds=0.02, streams=1)
    costs = {cost.group: cost.queue_seconds for cost in choose_group([idle, decoding], 10, DICE).costs}
    assert costs == {"idle": 0.0, "decoding": 0.02}
    holder = a_group("holder", step_seconds=1.0, device_tokens=30)
    assert choose_group([idle, holder], 40, DICE).group == "holder"


def test_decodes_weigh_too() -> None:
    """Of two groups with nothing queued, the one whose steps are shorter is cheaper."""
    full, empty = a_group("full", step_seconds=0.04), a_group("empty", step_seconds=0.02)
    assert choose_group([full, empty], 10, DICE).group == "empty"


def test_a_group_with_fewer_streams_is_cheaper() -> None:
    """Of two groups that differ only in running streams, the one with fewer is cheaper. A prompt of 1 s stalls each
    stream by 1 s; a stall of 20 s, which is 0.1 s for each of 200 tokens, costs as much as a first token after 2 s."""
    many, few = a_group("many", streams=40), a_group("few", streams=10)
    decision = choose_group([many, few], 1000, DICE, answer_tokens=200)
    assert decision.group == "few"
    assert {cost.group: cost.stall_seconds for cost in decision.costs} == {"many": 4.0, "few": 1.0}
    longer = choose_group([many, few], 1000, DICE, answer_tokens=400)
    assert longer.chosen.stall_seconds == 0.5, "longer answers have more time for the same stall"
    # Cached tokens stall no stream.
    assert choose_group([many._replace(device_tokens=1000), few], 1000, DICE).group == "many"


def test_a_full_group_is_chosen_only_for_what_it_holds() -> None:
    """While some group has room, a group without room is chosen only if it holds more of the prompt and is cheaper. If
    no group has room, the cheapest is chosen."""
    room = a_group("room", queued_prefill_tokens=100)
    full = a_group("full", has_room=False)
    decision = choose_group([room, full], 1000, DICE)
    assert decision.group == "room" and "; cheaper, but without room: full" in decision.why
    holds = full._replace(device_tokens=500)
    assert choose_group([room, holds], 1000, DICE).group == "full"
    assert choose_group([room._replace(device_tokens=500), holds], 1000, DICE).group == "room"
    assert choose_group([room, holds._replace(queued_prefill_tokens=5000)], 1000, DICE).group == "room"
    assert choose_group([room._replace(has_room=False), full], 1000, DICE).group == "full"


def test_an_old_measurement_of_an_idle_group_counts_little() -> None:
    """The less a group computes, the less its measured rate counts: an idle group that measured slow once gets requests
    again, a group that is slow while busy does not."""
    fast = a_group("fast", streams=1, busy_share=0.5)
    once = a_group("slow", prefill_tokens_per_second=700.0)
    assert choose_group([fast, once], 64, DICE).group == "slow"
    assert choose_group([fast, once._replace(busy_share=0.5)], 64, DICE).group == "fast"


def test_a_group_without_measurements_is_assumed_average() -> None:
    """A new group is tried like the others, whatever their rate."""
    new = Candidate("new")
    decision: Decision = choose_group([a_group("old", prefill_tokens_per_second=50.0), new], 1000, DICE)
    assert {cost.prefill_seconds for cost in decision.costs} == {20.0}


def test_routers_that_decide_at_once_do_not_all_choose_the_cheapest() -> None:
    """Other routers send work of 2 s meanwhile. It fills the groups with queues of 0 and 1 s up to a level of 2.5 s of
    cost, so of 100 choices 75 go to the first and 25 to the second; a queue of 5 s stays above the level. With a tenth
    of that work all go to the first."""
    queues = {"free": 0, "short": 1000, "long": 5000}
    for unseen, shares in (
        (2.0, {"free": 0.75, "short": 0.25, "long": 0.0}),
        (0.2, {"free": 1, "short": 0, "long": 0}),
    ):
        groups = [a_group(name, queued_prefill_tokens=tokens) for name, tokens in queues.items()]
        groups[2] = groups[2]._replace(unseen_requests=unseen)
        rng = random.Random(1)
        decisions = [choose_group(groups, 1000, rng) for _ in range(2000)]
        counts = Counter(decision.group for decision in decisions)
        assert {name: counts[name] / 2000 for name in queues} == pytest.approx(shares, abs=0.03)
    groups = [group._replace(unseen_requests=1) for group in groups]
    spread = next(decision for _ in range(99) if (decision := choose_group(groups, 1000, rng)).group == "short")
    assert spread.why.endswith("; cheaper, but other routers will send there too: free")


def test_prompts_without_work_are_spread_over_equal_groups() -> None:
    """Groups that hold the whole prompt cost the same whatever other routers send, and are chosen equally often."""
    groups = [a_group(name, device_tokens=1000, unseen_requests=5) for name in "ab"]
    rng = random.Random(1)
    counts = Counter(choose_group(groups, 1000, rng).group for _ in range(1000))
    assert all(400 < counts[name] < 600 for name in "ab")


def test_a_kept_decision_has_the_cheapest_groups() -> None:
    """A decision among many groups is kept with the chosen group and the 32 that are cheapest, and still says why."""
    groups = [a_group(f"g{place:03}", queued_prefill_tokens=10 * place, has_room=place > 50) for place in range(200)]
    decision = choose_group(random.Random(1).sample(groups, 200), 1000, DICE)
    kept = decision.keep_cheapest()
    assert decision.group == kept.group == "g051" and kept.chosen == decision.chosen and len(kept.costs) == 33
    assert {cost.group for cost in kept.costs} == {"g051", *(f"g{place:03}" for place in range(32))}
    assert kept.why == decision.why and kept.why.endswith("without room: g000, g001, g002")
    few = choose_group(groups[:33], 1000, DICE)
    assert few.keep_cheapest() is few
