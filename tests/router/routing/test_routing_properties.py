"""choose_group() for any groups: what docs/routing.md says follows from the cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.router.routing.routing_cost import Candidate
from tests.examples import examples
from tests.router.routing.candidates import CANDIDATES, choose_group

DICE = random.Random(0)


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000))
def test_the_cheapest_wins_and_its_terms_say_why(candidates: list[Candidate], prompt: int) -> None:
    """The decision has one row of cost per candidate, none negative. No other group's total is lower, except groups
    without room that hold no more of the prompt than one with room."""
    decision = choose_group(candidates, prompt, random.Random(0))
    totals = {cost.group: cost.total_seconds for cost in decision.costs}
    assert totals.keys() == {candidate.group for candidate in candidates}
    ready = max((cost.cached_tokens for cost in decision.costs if cost.has_room), default=-1)
    compared = [cost for cost in decision.costs if cost.has_room or cost.cached_tokens > ready]
    cheaper = [cost for cost in compared if cost.total_seconds < decision.chosen.total_seconds]
    assert decision.chosen in compared and totals[decision.group] == decision.chosen.total_seconds
    assert not cheaper
    assert all(seconds >= 0 for cost in decision.costs for seconds in cost[1:8])
    assert all(cost.total_seconds == pytest.approx(sum(cost[1:8])) for cost in decision.costs)
    assert decision.why.startswith(f"{decision.group}: ")


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.data())
def test_no_cost_jumps(candidates: list[Candidate], prompt: int, queued: int, data: st.DataObject) -> None:
    """A thousandth more of anything moves no total by more than a hundredth and a little: there is no cliff."""
    place = data.draw(st.integers(0, len(candidates) - 1))
    field = data.draw(st.sampled_from(["queued_prefill_tokens", "step_seconds", "free_tokens"]))
    old = candidates[place]
    changed = [*candidates]
    changed[place] = old._replace(**{field: getattr(old, field) * 1.001})
    before = choose_group(candidates, prompt, DICE, queued_in_router=queued).costs
    after = choose_group(changed, prompt, DICE, queued_in_router=queued).costs
    for one, other in zip(before, after, strict=True):
        # Eviction is a difference of what is queued and what is free, so it moves by their size and not its own.
        moved = 0.001 * (old.queued_prefill_tokens + old.free_tokens) / (old.prefill_tokens_per_second or 100)
        behind = 40 * (1 + queued)
        assert abs(one.total_seconds - other.total_seconds) <= 0.01 * one.total_seconds + moved * behind + 1e-9


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.floats(0, 1))
def test_no_request_waits_longer_than_an_idle_group_computes(
    candidates: list[Candidate], prompt: int, idle_busy: float
) -> None:
    """While no request waits that could use an idle group, a group that answers later than the idle group is never
    chosen, however much of the prompt it holds, how long its queue is, and however busy the idle group was before."""
    idle = Candidate(
        "idle", prefill_tokens_per_second=500.0, step_seconds=0.1, busy_share=idle_busy, free_tokens=prompt
    )
    decision = choose_group([*candidates, idle], prompt, random.Random(0))
    (alone,) = [cost for cost in decision.costs if cost.group == "idle"]
    assert alone.queue_seconds == alone.restore_seconds == alone.eviction_seconds == alone.delay_seconds == 0.0
    assert decision.chosen.first_token_seconds <= alone.first_token_seconds


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.integers(1, 10_000), st.data())
def test_a_longer_queue_makes_a_group_dearer_and_no_other(
    candidates: list[Candidate], prompt: int, queued: int, more: int, data: st.DataObject
) -> None:
    """More prompt tokens queued at a group raise its cost and leave those of the others as they are. So a group that
    was not chosen is not chosen for its queue, and its neighbours are not avoided for it."""
    place = data.draw(st.integers(0, len(candidates) - 1))
    longer = [*candidates]
    longer[place] = longer[place]._replace(queued_prefill_tokens=longer[place].queued_prefill_tokens + more)
    before = choose_group(candidates, prompt, DICE, queued_in_router=queued)
    after = choose_group(longer, prompt, DICE, queued_in_router=queued)
    for number, (one, other) in enumerate(zip(before.costs, after.costs, strict=True)):
        assert other.total_seconds > one.total_seconds if number == place else other == one
    assert after.group in (before.group, *(c.group for c in candidates if c.group != candidates[place].group))


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.integers(1, 1000), st.data())
def test_more_cached_tokens_never_hurt(
    candidates: list[Candidate], prompt: int, queued: int, more: int, data: st.DataObject
) -> None:
    """A group that holds more of the prompt on the device costs no more, and is chosen if it was before."""
    place = data.draw(st.integers(0, len(candidates) - 1))
    richer = [*candidates]
    richer[place] = richer[place]._replace(device_tokens=richer[place].device_tokens + more)
    before = choose_group(candidates, prompt, DICE, queued_in_router=queued)
    after = choose_group(richer, prompt, DICE, queued_in_router=queued)
    assert after.costs[place].total_seconds <= before.costs[place].total_seconds
    if before.group == candidates[place].group:
        assert after.chosen.total_seconds <= before.chosen.total_seconds


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_the_scale_of_rates_does_not_matter(
    candidates: list[Candidate], prompt: int, queued: int, factor: float
) -> None:
    """Groups that are all `factor` times as fast have costs of 1 / `factor`, and the same one is chosen."""
    known = [c._replace(prefill_tokens_per_second=c.prefill_tokens_per_second or 100.0) for c in candidates]
    faster = [
        c._replace(
            prefill_tokens_per_second=c.prefill_tokens_per_second * factor,
            restore_tokens_per_second=c.restore_tokens_per_second * factor,
            step_seconds=c.step_seconds / factor,
        )
        for c in known
    ]
    one = choose_group(known, prompt, random.Random(0), queued_in_router=queued)
    other = choose_group(faster, prompt, random.Random(0), queued_in_router=queued)
    for slow, fast in zip(one.costs, other.costs, strict=True):
        assert fast.total_seconds * factor == pytest.approx(slow.total_seconds)
    assert one.group == other.group


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.floats(0, 100), st.integers(0, 1000))
def test_a_spread_choice_passes_the_gate(candidates: list[Candidate], prompt: int, unseen: float, seed: int) -> None:
    """However much other routers send, the choice is a group that the gate allows, whose cost is at most the level: the
    least cost plus all the work that others send."""
    groups = [candidates[0]._replace(unseen_requests=unseen), *candidates[1:]]
    decision = choose_group(groups, prompt, random.Random(seed))
    ready = max((cost.cached_tokens for cost in decision.costs if cost.has_room), default=-1)
    allowed = [cost for cost in decision.costs if cost.has_room or cost.cached_tokens > ready]
    cheapest = min(allowed, key=lambda cost: cost.total_seconds)
    work = max(cost.prefill_seconds + cost.restore_seconds for cost in allowed) * unseen
    assert decision.chosen in allowed
    assert decision.chosen.total_seconds <= (cheapest.total_seconds + work) * (1 + 1e-9)


@settings(max_examples=examples(50))
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.randoms())
def test_the_order_of_the_groups_does_not_matter(
    candidates: list[Candidate], prompt: int, queued: int, rng: random.Random
) -> None:
    """Each group has the same cost wherever it stands among the others."""
    shuffled = rng.sample(candidates, len(candidates))
    one = choose_group(candidates, prompt, DICE, queued_in_router=queued)
    other = choose_group(shuffled, prompt, DICE, queued_in_router=queued)
    costs = {cost.group: cost for cost in other.costs}
    for cost in one.costs:
        assert costs[cost.group][1:9] == pytest.approx(cost[1:9]) and costs[cost.group][9:] == cost[9:]
