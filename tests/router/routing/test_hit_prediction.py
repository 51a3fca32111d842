"""HitPrediction: predicted and found cached tokens are counted, and a group that differs for long diverges."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.routing.hit_prediction import HitPrediction


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=100))
def test_every_prompt_is_counted(prompts: list[tuple[int, int]]) -> None:
    """Every count is the sum over the prompts."""
    audit = HitPrediction()
    divergences = sum(audit.record("a", predicted, found) for predicted, found in prompts)
    stats = audit.audits["a"]
    assert stats.prompts == len(prompts) and stats.divergences == divergences
    assert stats.predicted_tokens == sum(predicted for predicted, _ in prompts)
    assert stats.found_tokens == sum(found for _, found in prompts)
    assert stats.error_tokens == sum(abs(predicted - found) for predicted, found in prompts)
    assert audit.audits["b"].prompts == 0


def test_a_group_as_predicted_never_diverges() -> None:
    """Nor does a group that differs now and then."""
    audit = HitPrediction()
    assert not any(audit.record("a", 1000, 0 if turn % 5 == 0 else 1000) for turn in range(500))


def test_a_group_without_the_predicted_blocks_diverges() -> None:
    """It diverges after sixteen prompts, and again after sixteen more."""
    audit = HitPrediction()
    assert [turn for turn in range(40) if audit.record("a", 512, 0)] == [15, 31]
    assert not any(audit.record("b", 0, 0) for _ in range(100))
