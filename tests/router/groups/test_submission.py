"""A submission is counted in the group's load and in the prefix index exactly once, however and whenever it ends."""

import pytest

from coatcheck.proto.errors import SlowReader
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import FINISH_REASON_LENGTH
from coatcheck.proto.stubs.worker_pb2 import FirstOutput, Registration, SequenceOutput, SnapshotChunk
from coatcheck.router.groups.group_failures import FailureCause, GroupFailure, GroupLost
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import MAX_UNREAD
from tests.router.groups.offline_connection import MODEL, OfflineConnection


async def test_a_choice_that_ends_twice_is_counted_once() -> None:
    """A choice that is aborted and then finishes leaves the load once; closing ends the others."""
    connection = OfflineConnection()
    submission = connection.open(choices=3)
    submission.abort_choice(1)
    submission.deliver(SequenceOutput(id=1, choice=1, finish_reason=FINISH_REASON_LENGTH))
    seen = connection.load.candidate("g")
    assert (seen.streams, seen.queued_prefill_tokens) == (2, 13)
    submission.record_first_output(FirstOutput())
    submission.record_first_output(FirstOutput())
    seen = connection.load.candidate("g")
    assert (seen.streams, seen.queued_prefill_tokens) == (2, 0)
    submission.close(finished=False)
    submission.close(finished=True)
    assert connection.load.candidate("g").streams == 0
    assert connection.aborts == [(1, 1), (1, None)]
    connection.load.check()


async def test_its_prompt_is_expected_until_the_group_has_computed_it() -> None:
    """The prompt's whole blocks match as expected until the first output, or until the submission is closed."""
    connection = OfflineConnection()
    first, second = connection.open(1), connection.open(2)
    assert len(connection.index.expected_blocks) == 3
    first.record_first_output(FirstOutput(device_tokens=4))
    assert len(connection.index.expected_blocks) == 3, "the second prompt is not computed yet"
    second.close(finished=False)
    assert len(connection.index.expected_blocks) == 0
    assert connection.index.hit_prediction.audits["g"].prompts == 1


async def test_each_choice_computes_the_prompt_without_a_prefix_cache() -> None:
    """The load of such a group has the prompt once for each choice, and the index expects none of its blocks."""
    connection = OfflineConnection()
    connection.registration.no_prefix_cache = True
    submission = connection.open(1, choices=3, prompt_tokens=13)
    assert connection.load.candidate("g").queued_prefill_tokens == 3 * 13
    assert submission.uncached_tokens == 13, "of each choice"
    assert len(connection.index.expected_blocks) == 0
    submission.record_first_output(FirstOutput())
    assert connection.load.candidate("g").queued_prefill_tokens == 0
    submission.close(finished=True)
    connection.load.check()


async def test_a_snapshot_of_states_is_expected_where_the_group_will_save_it() -> None:
    """Until the first output, after the last block that leaves 4 tokens. A prompt without choices needs 64 tokens."""
    connection = OfflineConnection()
    connection.index.add_group("g", "1", keeps_states=True)
    chain = Request("r", range(100), SamplingParams(max_tokens=1, seed=1)).block_hashes(MODEL)

    def expected() -> float:
        return float(connection.index.match(chain).expected[0])

    for tokens, choices, blocks in ((99, 1, 23), (69, 1, 16), (67, 1, 0), (67, 2, 15), (7, 2, 0)):
        submission = connection.open(tokens, choices=choices, prompt_tokens=tokens)
        assert expected() == blocks
        submission.record_first_output(FirstOutput())
        assert expected() == 0
        submission.close(finished=True)
    connection.index.check()


async def test_a_submission_of_a_dropped_stream_changes_nothing_in_the_next() -> None:
    """The group attaches again before the submission is closed: the new load and the new index entry stay."""
    connection = OfflineConnection()
    old = connection.open(1)
    connection.index.add_group("g", "1")
    connection.load = GroupLoad(Registration(model=MODEL))
    connection.submissions.fail_all(GroupFailure("gone", FailureCause.UNKNOWN))
    new = connection.open(2)
    before = connection.load.candidate("g"), len(connection.index.expected_blocks)
    with pytest.raises(GroupLost):
        await anext(old)
    old.close(finished=True)
    assert (connection.load.candidate("g"), len(connection.index.expected_blocks)) == before
    assert connection.submissions.get(2) is new and not connection.aborts
    connection.load.check()
    connection.index.check()


async def test_a_reader_that_falls_too_far_behind_is_cut_off() -> None:
    """Past the limit no more outputs are kept, and the group is told once to abort. The kept outputs can still be
    read."""
    connection = OfflineConnection()
    submission = connection.open(7, choices=2)
    for position in range(2 * MAX_UNREAD + 5):
        submission.deliver(SequenceOutput(id=7, choice=position % 2, token_ids=[position]))
    assert connection.aborts == [(7, None)]
    assert len(await anext(submission)) == 2 * MAX_UNREAD
    with pytest.raises(SlowReader, match="fell 8192 tokens behind"):
        await anext(submission)
    submission.close(finished=False)
    assert connection.aborts == [(7, None)]


async def test_a_group_that_keeps_diverging_is_asked_for_a_snapshot() -> None:
    """Sixteen prompts of which the group finds far more cached tokens than predicted: one snapshot is requested."""
    connection = OfflineConnection()
    for id in range(1, 17):
        connection.open(id).record_first_output(FirstOutput(device_tokens=8))
    assert connection.snapshots == ["its cached tokens differ from those that its events predict"]


async def test_a_group_is_not_judged_while_its_snapshot_is_coming() -> None:
    """Prompts that find blocks that the router has not been told of yet make it request no other snapshot."""
    connection = OfflineConnection()
    connection.index.apply_snapshot("g", SnapshotChunk(epoch="1", first=True))
    for id in range(1, 33):
        connection.open(id).record_first_output(FirstOutput(device_tokens=8))
    assert not connection.snapshots and not connection.index.hit_prediction.audits["g"].prompts
