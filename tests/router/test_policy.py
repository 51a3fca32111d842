"""Which group answers: lowest cost in seconds, ties at random, every term accounted for."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.policy import Candidate, choose

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        group=st.text("abcdef", min_size=1, max_size=3),
        queued_prefill_tokens=st.integers(0, 100_000),
        prefill_tokens_per_second=st.sampled_from([0.0, 100.0, 10_000.0]),
        step_seconds=st.floats(0, 1),
        running=st.integers(0, 100),
        device_tokens=st.integers(0, 10_000),
        host_tokens=st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.group,
)


@given(CANDIDATES, st.integers(1, 10_000))
def test_the_cheapest_wins_and_its_terms_say_why(candidates: list[Candidate], prompt: int) -> None:
    """The decision carries one row of terms per candidate, and no other group's total is lower."""
    decision = choose(candidates, prompt, random.Random(0))
    totals = {terms.group: terms.total for terms in decision.terms}
    assert totals.keys() == {candidate.group for candidate in candidates}
    assert totals[decision.group] == min(totals.values())
    assert all(terms.prefill >= 0 for terms in decision.terms)
    assert decision.why.startswith(f"{decision.group}: ")


def test_ties_are_broken_at_random() -> None:
    """Equal groups get equal shares, not all the first one."""
    rng = random.Random(1)
    counts = Counter(choose([Candidate(name) for name in "abcd"], 100, rng).group for _ in range(4000))
    assert set(counts) == set("abcd") and all(900 < count < 1100 for count in counts.values())


def test_a_cached_prefix_wins_until_the_queue_outweighs_it() -> None:
    """Locality is worth exactly the prefill it saves."""
    holder = Candidate("holder", prefill_tokens_per_second=1000.0, device_tokens=800)
    idle = Candidate("idle", prefill_tokens_per_second=1000.0)
    assert choose([holder, idle], 1000, random.Random(0)).group == "holder"
    busy = Candidate("holder", prefill_tokens_per_second=1000.0, device_tokens=800, queued_prefill_tokens=801)
    assert choose([busy, idle], 1000, random.Random(0)).group == "idle"


def test_decodes_weigh_too() -> None:
    """Of two groups with nothing queued, the one with fewer running sequences is cheaper."""
    full = Candidate("full", step_seconds=0.02, running=30)
    assert choose([full, Candidate("empty", step_seconds=0.02, running=1)], 10, random.Random(0)).group == "empty"
