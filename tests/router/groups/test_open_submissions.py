"""OpenSubmissions: readers are woken at once while rounds are short; steps that arrive during a long round are
delivered together."""

import asyncio

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.groups.group_failures import FailureCause, GroupFailure, GroupLost
from coatcheck.router.groups.open_submissions import OpenSubmissions
from coatcheck.router.groups.submission import Submission
from tests.router.groups.offline_connection import OfflineConnection


def submitted(*ids: int) -> tuple[OpenSubmissions, list[Submission]]:
    """An OpenSubmissions without a stream, and open submissions with these ids."""
    connection = OfflineConnection()
    return connection.submissions, [connection.open(id) for id in ids]


def step(token: int, *ids: int, attempt: int = 0) -> list[SequenceOutput]:
    """One step's outputs: one token for each submission."""
    return [SequenceOutput(id=id, attempt=attempt, token_ids=[token]) for id in ids]


async def test_a_waiting_reader_is_woken_at_once() -> None:
    """With time to spare, an output is delivered in the same turn of the event loop."""
    submissions, (submission,) = submitted(1)
    reader = asyncio.ensure_future(anext(submission))
    await asyncio.sleep(0)
    submissions.deliver(step(5, 1))
    await asyncio.sleep(0)
    assert reader.done() and [list(output.token_ids) for output in reader.result()] == [[5]]


async def test_steps_that_arrive_during_a_round_are_delivered_together() -> None:
    """While a reader writes the last step's output, further steps wait and are delivered as one."""
    submissions, (slow, quick) = submitted(1, 2)
    readers = [asyncio.ensure_future(anext(submission)) for submission in (slow, quick)]
    await asyncio.sleep(0)
    submissions.deliver(step(5, 1, 2))
    await asyncio.gather(*readers)  # both have taken; neither is back for more
    again = asyncio.ensure_future(anext(quick))
    await asyncio.sleep(0.002)  # the slow one's, which a round is as long as
    submissions.deliver(step(6, 1, 2))
    await asyncio.sleep(0)
    assert not again.done()
    submissions.deliver(step(7, 1, 2))
    assert [list(output.token_ids) for output in await again] == [[6], [7]]
    assert [list(output.token_ids) for output in await anext(slow)] == [[6], [7]]


async def test_a_reader_that_never_returns_delays_others_only_briefly() -> None:
    """A client that does not read delays the other streams by one short wait."""
    submissions, (stuck, reading) = submitted(1, 2)
    first = [asyncio.ensure_future(anext(submission)) for submission in (stuck, reading)]
    await asyncio.sleep(0)
    submissions.deliver(step(0, 1, 2))
    await asyncio.gather(*first)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        for token in range(1, 50):
            taking = asyncio.ensure_future(anext(reading))
            await asyncio.sleep(0)
            submissions.deliver(step(token, 1, 2))
            assert [list(output.token_ids) for output in await taking] == [[token]]
    assert len(await anext(stuck)) == 49


async def test_outputs_without_an_open_submission_are_dropped() -> None:
    """Outputs of closed submissions, unknown ids and other attempts change nothing. The submissions is idle when no
    submission is open."""
    submissions, (submission,) = submitted(1)
    submissions.deliver([*step(5, 2), *step(6, 1, attempt=1)])
    submissions.deliver(step(7, 1))
    assert [list(output.token_ids) for output in await anext(submission)] == [[7]]
    submissions.remove(submission)
    submissions.remove(submission)
    assert len(submissions) == 0
    await submissions.wait_until_idle()


async def test_a_loss_is_raised_after_the_delivered_outputs() -> None:
    """A reader gets the outputs that came before the stream broke, then GroupLost."""
    submissions, (submission,) = submitted(1)
    submissions.deliver(step(5, 1))
    submissions.fail_all(GroupFailure("gone", FailureCause.UNKNOWN))
    assert len(await anext(submission)) == 1
    try:
        await anext(submission)
    except GroupLost:
        return
    raise AssertionError("the loss was not told")
