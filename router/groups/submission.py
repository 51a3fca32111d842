"""Submission: one request sent to one group, from the moment it is sent until its outputs are no longer read.

The GroupConnection delivers outputs, and a Relay reads them. A read returns all outputs since the last read, so a slow
reader gets a few large deltas and not a queue of small ones. A reader that falls too far behind gets SlowReader. A
submission ends with the group's stream; the request is then sent to another group as a new submission.

While it is open, a submission is counted in two structures of the router: its tokens and choices in the group's
GroupLoad, and its prompt's blocks in the prefix index, as expected.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

from coatcheck.proto.errors import CoatcheckError, SlowReader
from coatcheck.proto.snapshot_points import choose_snapshot_points
from coatcheck.proto.stubs.worker_pb2 import FirstOutput, SequenceOutput
from coatcheck.router.groups.group_failures import GroupLost
from coatcheck.router.groups.request import Request
from coatcheck.router.routing.routing_cost import Decision

if TYPE_CHECKING:
    from coatcheck.router.groups.group_connection import GroupConnection

# Unread outputs kept for each choice: ten seconds of a fast stream, or a few megabytes with log-probabilities.
MAX_UNREAD: Final = 8192


class SubmissionReturned(Exception):
    """The group has more work queued than the router knew. Nothing was computed; the request can go to any group."""


class Submission:
    """`async for outputs in submission` reads it, and `close` ends it.

    `choices`: number of choices. `uncached_tokens`: prompt tokens that the group is expected to compute; without a
    prefix cache, for each choice. `suspicion`: see PoisonSuspicion.level. `woken_in_round`: the round of
    OpenSubmissions in which the reader was woken. When the reader waits again, `on_waiting_again` is called with this
    round, and `woken_in_round` becomes 0.
    """

    def __init__(
        self,
        connection: "GroupConnection",
        request: Request,
        decision: Decision,
        id: int,
        attempt: int = 0,
    ) -> None:
        self.group = connection.name
        self.id = id
        self.attempt = attempt
        self.decision = decision
        self.model = connection.model
        self.group_kind = connection.group_kind
        self.choices = request.sampling.n
        self.uncached_tokens = len(request.prompt_token_ids) - decision.chosen.cached_tokens
        self.suspicion = 0
        self.woken_in_round = 0
        self.on_waiting_again: Callable[[int], None] | None = None
        self._connection = connection
        self._load = connection.load
        caches = not connection.registration.no_prefix_cache
        # Without a prefix cache each choice computes the prompt.
        computed = self.uncached_tokens if caches else self.uncached_tokens * self.choices
        self._load_number = self._load.add_submission(computed, self.choices)
        self._open_choices = (1 << self.choices) - 1  # a bit for each choice that has not ended
        self._has_expected_blocks = caches  # the index counts the prompt's blocks as expected
        if caches:
            connection.index.add_expected(
                self.group, self, request.block_hashes(self.model), self._expected_snapshot_point(request)
            )
        self._outputs: list[SequenceOutput] = []
        self._failure: GroupLost | SubmissionReturned | CoatcheckError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        """Waits for outputs and returns all that were not read yet. Raises GroupLost once the stream has ended,
        SubmissionReturned, SlowReader, and the group's error if the group has refused the request."""
        if self.woken_in_round and self.on_waiting_again is not None:
            round, self.woken_in_round = self.woken_in_round, 0
            self.on_waiting_again(round)
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def record_first_output(self, first_output: FirstOutput) -> None:
        """Records that the group has computed the prompt, and how many cached tokens it found. Only the report of the
        first choice counts. If predictions for the group have been wrong for long (see HitPrediction), a snapshot of
        its blocks is requested. Until its snapshot is complete, predictions are not compared: the index lacks blocks.
        """
        self._load.record_first_output(self._load_number)
        self._connection.on_room()
        if not self._has_expected_blocks:
            return
        self._remove_expected()
        index = self._connection.index
        if not index.is_complete(self.group):
            return
        predicted, found = self.decision.chosen.cached_tokens, first_output.device_tokens + first_output.host_tokens
        if index.hit_prediction.record(self.group, predicted, found):
            self._connection.request_snapshot("its cached tokens differ from those that its events predict")

    def record_return(self, queued_tokens: int) -> None:
        """The group has returned the request, because `queued_tokens` prompt tokens are queued there."""
        self._load.record_return(self._load_number, queued_tokens)
        self.fail(SubmissionReturned())

    def set_suspicion(self, level: int) -> None:
        """Sets how suspect the request is. Other suspects may then run on the group, so waiting ones are woken."""
        if self.suspicion != level:
            self.suspicion = level
            self._connection.on_change()

    def abort_choice(self, choice: int) -> None:
        """Tells the group to abort one choice."""
        self._end_choice(choice)
        if self._failure is None:
            self._connection.send_abort(self.id, choice)

    def close(self, *, finished: bool) -> None:
        """Ends the submission. `finished`: every choice has ended. If not, tells the group to abort, unless the
        submission has failed before: it was refused or returned, has lost its group, or its reader was too slow."""
        if self._failure is None and not finished:
            self._connection.send_abort(self.id, None)
        self._remove_expected()
        if self._open_choices:
            self._load.end_choices(self._load_number, self._open_choices.bit_count())
            self._open_choices = 0
        self._connection.submissions.remove(self)
        self.set_suspicion(0)
        self._connection.on_room()

    def deliver(self, output: SequenceOutput) -> None:
        """Keeps an output for the reader; `wake_reader` follows. A choice that finishes is taken out of the GroupLoad
        here and not when the reader wakes, because reports that follow this output no longer contain it."""
        if output.finish_reason:
            self._end_choice(output.choice)
        if len(self._outputs) < MAX_UNREAD * self.choices:
            self._outputs.append(output)
        elif self._failure is None:
            self._connection.send_abort(self.id, None)
            self._failure = SlowReader(
                f"this stream fell {MAX_UNREAD} tokens behind; read it as it comes, or ask for less"
            )

    def wake_reader(self, round: int) -> bool:
        """Wakes the reader if it waits; returns whether it did."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        self.woken_in_round = round
        waiter.set_result(None)
        return True

    def fail(self, failure: GroupLost | SubmissionReturned | CoatcheckError) -> None:
        """Raises `failure` to the reader, after the outputs that were delivered before."""
        self._failure = failure
        self.wake_reader(0)

    def _end_choice(self, choice: int) -> None:
        if self._open_choices >> choice & 1:
            self._open_choices &= ~(1 << choice)
            self._load.end_choices(self._load_number)

    def _expected_snapshot_point(self, request: Request) -> int:
        """The number of leading blocks after which the group will save states near the prompt's end, if its model keeps
        states; 0 if nowhere. The router cannot predict the point where the prompt branches off from earlier ones."""
        size, prompt_len = self.model.block_size, len(request.prompt_token_ids)
        start = self.decision.chosen.cached_tokens // size
        points = choose_snapshot_points(
            start, start, prompt_len=prompt_len, num_tokens=prompt_len, block_size=size, num_choices=self.choices
        )
        return points[-1] if points else 0

    def _remove_expected(self) -> None:
        if self._has_expected_blocks:
            self._has_expected_blocks = False
            self._connection.index.remove_expected(self.group, self)
