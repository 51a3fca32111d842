"""What a router believes of a group's load: the group's word, and what it sent since."""

import pytest

from coatcheck.proto.coatcheck_pb2 import GetModelResponse, GroupStatus
from coatcheck.proto.worker_pb2 import Load, Registration
from coatcheck.router.group_load import GroupLoad
from coatcheck.router.prefix_match import Match

REGISTRATION = Registration(model=GetModelResponse(block_size=16), num_blocks=100, max_batch_tokens=512)


def test_what_was_sent_counts_until_a_report_has_it() -> None:
    """A prompt adds to the queue at once, and leaves it with the first report that is surely younger."""
    load = GroupLoad(REGISTRATION)
    load.report(Load(queued_prefill_tokens=100, status=GroupStatus(waiting=2)), now=1.0)
    load.sent(50, now=1.5)
    seen = load.candidate("a")
    assert (seen.queued_prefill_tokens, seen.queued_requests) == (150, 3)
    load.report(Load(queued_prefill_tokens=90, status=GroupStatus(waiting=2)), now=1.51)
    assert load.candidate("a").queued_prefill_tokens == 140  # that one may have been on its way already
    load.report(Load(queued_prefill_tokens=130, status=GroupStatus(waiting=3)), now=1.6)
    seen = load.candidate("a")
    assert (seen.queued_prefill_tokens, seen.queued_requests) == (130, 3)


def test_room_is_what_was_registered_until_the_group_says_more() -> None:
    """Free and cold room come in tokens, and so do the prompt's blocks."""
    load = GroupLoad(REGISTRATION)
    assert load.candidate("a").free_tokens == 1600
    load.report(
        Load(status=GroupStatus(blocks_total=100, blocks_used=30, blocks_cached=60, restore_tokens_per_second=9)),
        now=1.0,
    )
    seen = load.candidate("a", Match(3, 2, 1))
    assert (seen.free_tokens, seen.cold_tokens, seen.chunk, seen.restore_tokens_per_second) == (160, 960, 512, 9)
    assert (seen.device_tokens, seen.host_tokens, seen.expected_tokens) == (48, 32, 16)


def test_the_busy_share_follows_what_the_group_counts() -> None:
    """A group that spends its time on prompts is soon seen as busy, and as idle again when it does not."""
    load = GroupLoad(REGISTRATION)
    load.report(Load(prefill_seconds=1000.0), now=0.0)
    assert load.candidate("a").busy == 0.0  # what was before is not known to be lately
    for second in range(1, 301):
        load.report(Load(prefill_seconds=1000.0 + 0.8 * second), now=float(second))
    assert load.candidate("a").busy == pytest.approx(0.8, abs=0.01)
    for second in range(301, 601):
        load.report(Load(prefill_seconds=1240.0), now=float(second))
    assert load.candidate("a").busy < 0.01


def test_room_follows_what_begins_and_ends_between_reports() -> None:
    """A seat that comes free is known at once, one that is taken too; a refusal closes the group until its report."""
    load = GroupLoad(Registration(max_num_seqs=4))  # and four may be ready
    load.report(Load(status=GroupStatus(running=4)), now=0.0)
    sent = [load.sent(1, now=0.0) for _ in range(4)]
    assert not load.has_room
    for prompt in sent:
        prompt.begin()
    assert not load.has_room
    sent[0].end()
    sent[0].end()
    assert load.has_room
    load.sent(1, now=0.0)
    assert not load.has_room
    load.report(Load(status=GroupStatus()), now=1.0)
    assert load.has_room
    load.refused()
    assert load.refuses and not load.has_room
    load.report(Load(status=GroupStatus()), now=2.0)
    assert load.has_room
