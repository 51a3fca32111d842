"""The audit: what was foreseen against what was found, and when a group is not believed any more."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.routing.hit_prediction import HitPrediction


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=100))
def test_every_prompt_is_counted(prompts: list[tuple[int, int]]) -> None:
    """The counts are sums, whatever comes."""
    audit = HitPrediction()
    divergences = sum(audit.record("a", foreseen, found) for foreseen, found in prompts)
    stats = audit.audits["a"]
    assert stats.prompts == len(prompts) and stats.divergences == divergences
    assert stats.foreseen_tokens == sum(foreseen for foreseen, _ in prompts)
    assert stats.found_tokens == sum(found for _, found in prompts)
    assert stats.error_tokens == sum(abs(foreseen - found) for foreseen, found in prompts)
    assert audit.audits["b"].prompts == 0


def test_a_group_that_keeps_its_word_never_diverges() -> None:
    """Nor does one that misses now and then."""
    audit = HitPrediction()
    assert not any(audit.record("a", 1000, 0 if turn % 5 == 0 else 1000) for turn in range(500))


def test_a_group_that_holds_nothing_of_what_it_said_diverges() -> None:
    """Sixteen prompts are enough; then it has sixteen more to prove itself."""
    audit = HitPrediction()
    assert [turn for turn in range(40) if audit.record("a", 512, 0)] == [15, 31]
    assert not any(audit.record("b", 0, 0) for _ in range(100))
