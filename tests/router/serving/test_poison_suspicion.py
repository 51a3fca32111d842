"""PoisonSuspicion: which losses make a request a suspect, and which refuse it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.groups.group_failures import FailureCause, GroupFailure, GroupFailures, GroupLost
from coatcheck.router.serving.poison_suspicion import PoisonSuspicion, groups_for_suspect


def loss(cause: FailureCause) -> GroupFailure:
    return GroupFailure(f"group a is lost: {cause.value}", cause)


def suspected(*causes: FailureCause, was_only_suspect: bool = True) -> PoisonSuspicion:
    """The suspicion after losses with these causes in a row."""
    made = PoisonSuspicion()
    for cause in causes:
        made.record_loss(GroupLost(loss(cause), was_only_suspect=was_only_suspect))
    return made


@pytest.mark.parametrize(
    ("causes", "level", "refused"),
    [
        ((), 0, False),
        ((FailureCause.PLANNED,) * 5, 0, False),
        ((FailureCause.UNKNOWN,), 1, False),
        ((FailureCause.CRASH,), 2, False),
        ((FailureCause.CRASH, FailureCause.CRASH), 2, True),
        ((FailureCause.UNKNOWN, FailureCause.CRASH), 2, False),
        ((FailureCause.CRASH, FailureCause.KILLED), 2, False),
        ((FailureCause.KILLED, FailureCause.UNKNOWN), 2, False),
        ((FailureCause.CRASH, FailureCause.KILLED, FailureCause.CRASH), 2, True),
        ((FailureCause.KILLED, FailureCause.KILLED, FailureCause.UNKNOWN), 2, True),
        ((FailureCause.CRASH, FailureCause.PLANNED, FailureCause.CRASH), 2, True),
    ],
    ids=str,
)
def test_two_crashes_or_three_losses_refuse_a_request(
    causes: tuple[FailureCause, ...], level: int, refused: bool
) -> None:
    """Two crashes in a row, or three losses of any cause, refuse a request; planned losses do not count."""
    suspicion = suspected(*causes)
    assert (suspicion.level, bool(suspicion.refusal)) == (level, refused)


def test_a_loss_beside_another_suspect_refuses_no_request() -> None:
    """A request that has lost groups beside another suspect is not refused, but runs alone. The next loss, alone,
    refuses it."""
    suspicion = suspected(FailureCause.CRASH, FailureCause.CRASH, FailureCause.CRASH, was_only_suspect=False)
    assert not suspicion.refusal and suspicion.level == 2
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal.startswith("4 groups in a row crashed")


def test_a_cause_that_becomes_known_later_counts() -> None:
    """Two losses of unknown cause do not refuse a request until both are known to be crashes."""
    failures = GroupFailures()
    suspicion = PoisonSuspicion()
    for name in ("a", "b"):
        suspicion.record_loss(
            GroupLost(
                failures.record_loss(name, 3, f"group {name} is lost", FailureCause.UNKNOWN), was_only_suspect=True
            )
        )
    failures.record_cause("a", 2, "of another incarnation")
    failures.record_cause("a", 3, "rank 0: Segmentation fault")
    assert not suspicion.refusal and failures.explained == {FailureCause.CRASH: 1}
    failures.record_cause("b", 3, "rank 0: Segmentation fault")
    assert suspicion.refusal == (  # type: ignore[comparison-overlap]
        "2 groups in a row crashed while they ran this request (rank 0: Segmentation fault)"
    )
    failures.record_cause("b", 3, "")  # reported twice
    assert failures.counts == {FailureCause.UNKNOWN: 2} and failures.explained == {FailureCause.CRASH: 2}


def test_the_end_of_an_incarnation_explains_only_its_last_loss() -> None:
    """How an incarnation ends explains only its last loss. The cause of an earlier loss, after which it has attached
    again, may stay unknown."""
    failures = GroupFailures()
    suspicion = suspected(FailureCause.CRASH)
    suspicion.record_loss(
        GroupLost(failures.record_loss("b", 3, "group b is lost", FailureCause.UNKNOWN), was_only_suspect=True)
    )
    failures.record_loss("b", 3, "group b is lost again", FailureCause.CRASH)
    failures.record_cause("b", 3, "rank 0: Segmentation fault")
    assert not suspicion.refusal and not failures.explained


def test_progress_clears_a_request() -> None:
    """After one token of an answer two crashes are not in a row; after 64 tokens no loss counts. A request that gets a
    few tokens from each group that it crashes is refused at the third."""
    suspicion = suspected(FailureCause.CRASH)
    suspicion.record_answer(1)
    assert suspicion.level == 0 and suspicion
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert not suspicion.refusal
    suspicion.record_answer(1)
    assert suspicion.level == 2, "it runs alone until it has 64 tokens"
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal
    suspicion.record_answer(100)
    assert suspicion.level == 0 and not suspicion and not suspicion.refusal


def test_what_becomes_known_after_an_answer_counts() -> None:
    """A request that gets a few tokens from each group that it crashes is refused at the third, also if the causes of
    the first two became known only after the tokens. If the groups were killed, it continues."""
    for crash in ("rank 0: Segmentation fault", ""):
        failures, suspicion = GroupFailures(), PoisonSuspicion()
        for name in ("a", "b"):
            suspicion.record_loss(
                GroupLost(
                    failures.record_loss(name, 0, f"group {name} is lost", FailureCause.UNKNOWN), was_only_suspect=True
                )
            )
            assert not suspicion.undecided, "one loss refuses no request, whatever its cause"
            suspicion.record_answer(5)
            failures.record_cause(name, 0, crash)
        assert suspicion.level == (2 if crash else 0)
        third = failures.record_loss("c", 0, "group c is lost", FailureCause.UNKNOWN)
        suspicion.record_loss(GroupLost(third, was_only_suspect=True))
        assert not suspicion.refusal and suspicion.undecided == ([third] if crash else [])
        failures.record_cause("c", 0, "rank 0: Segmentation fault")
        assert suspicion.refusal.startswith("3 groups in a row crashed") == bool(crash)
        assert not suspicion.undecided


def test_only_causes_that_decide_are_waited_for() -> None:
    """No cause decides if the last loss was shared with another suspect, or if one of two losses in a row is known to
    be a kill. Losses before 64 tokens of an answer decide nothing."""
    failures, suspicion = GroupFailures(), PoisonSuspicion()
    first, second = (failures.record_loss(name, 0, "lost", FailureCause.UNKNOWN) for name in ("a", "b"))
    suspicion.record_loss(GroupLost(first, was_only_suspect=True))
    suspicion.record_loss(GroupLost(second, was_only_suspect=False))
    assert not suspicion.undecided
    suspicion.record_answer(64)
    suspicion.record_loss(GroupLost(second, was_only_suspect=True))
    failures.record_cause("a", 0, "rank 0: Segmentation fault")
    assert not suspicion.undecided and suspicion.level == 1
    third = failures.record_loss("c", 0, "lost", FailureCause.UNKNOWN)
    suspicion.record_loss(GroupLost(third, was_only_suspect=True))
    assert suspicion.undecided == [second, third]
    failures.record_cause("b", 0, "")
    assert not suspicion.undecided and not suspicion.refusal


def test_streams_with_tokens_may_share_a_group() -> None:
    """After a crash only a request without tokens runs alone. A stream that loses the next group before it got a token
    there runs alone from then on, and is refused if it was the only suspect."""
    suspicion = PoisonSuspicion()
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True), answered=True)
    assert suspicion.level == 1 and not suspicion.refusal
    other = PoisonSuspicion()
    other.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True), answered=True)
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=False))
    assert suspicion.level == 2 and not suspicion.refusal
    other.record_answer(3)
    other.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=False), answered=True)
    assert other.level == 1 and not other.refusal, "it got tokens in between"
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal


@given(st.lists(st.tuples(st.integers(1, 2), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_a_suspect_of_level_2_runs_alone(requests: list[tuple[int, str, bool]]) -> None:
    """For any arrivals and ends, a request of level 2 shares a group with no other suspect."""
    groups: dict[str, list[int]] = {"a": [], "b": []}
    for level, preferred, leaves in requests:
        free = groups_for_suspect(level, [(name, max(there, default=0)) for name, there in groups.items()])
        if free:
            groups[preferred if preferred in free else free[0]].append(level)
        assert all(2 not in there or len(there) == 1 for there in groups.values())
        if leaves:
            groups[preferred].clear()


def test_suspects_of_level_1_share_a_group_only_if_none_is_free() -> None:
    """A request of level 1 gets a group without suspects if there is one, else one with suspects of level 1."""
    assert groups_for_suspect(1, [("a", 1), ("b", 0), ("c", 2)]) == ["b"]
    assert groups_for_suspect(1, [("a", 1), ("c", 2)]) == ["a"] and groups_for_suspect(2, [("a", 1), ("c", 2)]) == []
