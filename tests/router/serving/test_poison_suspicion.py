"""What lost groups say of a request, as pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.groups.group_failures import FailureCause, GroupFailure, GroupFailures, GroupLost
from coatcheck.router.serving.poison_suspicion import PoisonSuspicion, groups_for_suspect


def loss(cause: FailureCause) -> GroupFailure:
    return GroupFailure(f"group a is lost: {cause.value}", cause)


def suspected(*causes: FailureCause, was_only_suspect: bool = True) -> PoisonSuspicion:
    """After such losses in a row."""
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
def test_two_crashes_are_evidence_and_three_losses_are(
    causes: tuple[FailureCause, ...], level: int, refused: bool
) -> None:
    """Two groups that end by themselves, or three lost in any way, refuse a request; what was wanted is no sign."""
    suspicion = suspected(*causes)
    assert (suspicion.level, bool(suspicion.refusal)) == (level, refused)


def test_a_loss_beside_another_suspect_refuses_nobody() -> None:
    """What was twice beside another suspect goes on, by itself; the next loss, alone, is held against it."""
    suspicion = suspected(FailureCause.CRASH, FailureCause.CRASH, FailureCause.CRASH, was_only_suspect=False)
    assert not suspicion.refusal and suspicion.level == 2
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal.startswith("4 groups in a row ended by themselves")


def test_a_cause_that_becomes_known_later_counts() -> None:
    """Two losses of unknown cause are none too many until it is known that both groups ended by themselves."""
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
        "2 groups in a row ended by themselves while they ran this request (rank 0: Segmentation fault)"
    )
    failures.record_cause("b", 3, "")  # said again, or by a supervisor that knows less
    assert failures.counts == {FailureCause.UNKNOWN: 2} and failures.explained == {FailureCause.CRASH: 2}


def test_a_group_that_was_lost_from_sight_had_not_ended_then() -> None:
    """How a group ends is no sign against what had lost it before while it lived on: that may stay unknown."""
    failures = GroupFailures()
    suspicion = suspected(FailureCause.CRASH)
    suspicion.record_loss(
        GroupLost(failures.record_loss("b", 3, "group b is lost", FailureCause.UNKNOWN), was_only_suspect=True)
    )
    failures.record_loss("b", 3, "group b is lost again", FailureCause.CRASH)
    failures.record_cause("b", 3, "rank 0: Segmentation fault")
    assert not suspicion.refusal and not failures.explained


def test_progress_clears_a_request() -> None:
    """After a word of an answer two crashes are not in a row; after many none is remembered. A request that gets a
    little further on each group it ends is refused at the third."""
    suspicion = suspected(FailureCause.CRASH)
    suspicion.record_answer(1)
    assert suspicion.level == 0 and suspicion
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert not suspicion.refusal
    suspicion.record_answer(1)
    assert suspicion.level == 2, "it runs apart until it has come far"
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal
    suspicion.record_answer(100)
    assert suspicion.level == 0 and not suspicion and not suspicion.refusal


def test_what_becomes_known_after_an_answer_counts() -> None:
    """A request that gets a little further on each group which it faults is refused at the third, though how the first
    two had ended became known only when it was being answered again; had they been killed, it would go on."""
    for crash in ("rank 0: Segmentation fault", ""):
        failures, suspicion = GroupFailures(), PoisonSuspicion()
        for name in ("a", "b"):
            suspicion.record_loss(
                GroupLost(
                    failures.record_loss(name, 0, f"group {name} is lost", FailureCause.UNKNOWN), was_only_suspect=True
                )
            )
            assert not suspicion.undecided, "it goes on whatever the cause was"
            suspicion.record_answer(5)
            failures.record_cause(name, 0, crash)
        assert suspicion.level == (2 if crash else 0)
        third = failures.record_loss("c", 0, "group c is lost", FailureCause.UNKNOWN)
        suspicion.record_loss(GroupLost(third, was_only_suspect=True))
        assert not suspicion.refusal and suspicion.undecided == ([third] if crash else [])
        failures.record_cause("c", 0, "rank 0: Segmentation fault")
        assert suspicion.refusal.startswith("3 groups in a row ended by themselves") == bool(crash)
        assert not suspicion.undecided


def test_only_what_decides_is_waited_for() -> None:
    """Of two losses in a row nothing is to be learned once one is known to have been killed, nor of those that were
    shared with another suspect; what was answered far is not held against a request, whatever becomes known."""
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


def test_streams_that_were_being_answered_need_not_run_apart() -> None:
    """After a crash only what had got nothing of its answer runs apart; a stream that ends the next group too without
    having got anything there does from then on, and is refused if it was the only suspect there."""
    suspicion = PoisonSuspicion()
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True), answered=True)
    assert suspicion.level == 1 and not suspicion.refusal
    other = PoisonSuspicion()
    other.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True), answered=True)
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=False))
    assert suspicion.level == 2 and not suspicion.refusal
    other.record_answer(3)
    other.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=False), answered=True)
    assert other.level == 1 and not other.refusal, "it was answered in between: it ended neither"
    suspicion.record_loss(GroupLost(loss(FailureCause.CRASH), was_only_suspect=True))
    assert suspicion.refusal


@given(st.lists(st.tuples(st.integers(1, 2), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_a_suspect_of_a_crash_runs_apart(requests: list[tuple[int, str, bool]]) -> None:
    """Whoever comes and goes: beside a request that is very suspect there is no other suspect."""
    groups: dict[str, list[int]] = {"a": [], "b": []}
    for level, preferred, leaves in requests:
        free = groups_for_suspect(level, [(name, max(there, default=0)) for name, there in groups.items()])
        if free:
            groups[preferred if preferred in free else free[0]].append(level)
        assert all(2 not in there or len(there) == 1 for there in groups.values())
        if leaves:
            groups[preferred].clear()


def test_few_are_together_on_two_lost_groups() -> None:
    """One that is a little suspect runs alone where it can, else beside others that are as little so."""
    assert groups_for_suspect(1, [("a", 1), ("b", 0), ("c", 2)]) == ["b"]
    assert groups_for_suspect(1, [("a", 1), ("c", 2)]) == ["a"] and groups_for_suspect(2, [("a", 1), ("c", 2)]) == []
