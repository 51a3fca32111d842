"""OfflineGroups: a GroupRegistry whose groups exist in this process only.

The benchmark hands each connection the messages that its group would send; what the connection would send to the group
is dropped. All else is the router's own code.
"""

from collections.abc import Sequence
from typing import Any, Final

from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus
from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    FromGroup,
    KvEvent,
    KvEvents,
    Load,
    Registration,
    SnapshotChunk,
    Tier,
)
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.routing.routing_cost import Decision

BLOCK_SIZE: Final = 16
MODEL: Final = GetModelResponse(name="m", fingerprint="f", block_size=BLOCK_SIZE, max_model_len=1 << 20)
_EPOCH: Final = "1"
_MAX_SEQUENCES: Final = 256


class OfflineConnection(GroupConnection):
    """A connection without a stream. `next_sequence`: of the next KV events."""

    next_sequence = 0

    def receive(self, message: FromGroup) -> None:
        """Handles a message as if the group had sent it."""
        self._receive(message)

    def events(
        self, stored: Sequence[bytes], removed: Sequence[bytes] = (), tier: Tier = TIER_DEVICE, chain_blocks: int = 0
    ) -> FromGroup:
        """The group's next message of KV events. `stored` and `removed` are chains of blocks, or several of
        `chain_blocks` blocks each. The last blocks are removed first, as groups do."""
        events = [
            KvEvent(stored=is_stored, block_hash=block, parent_hash=parent, tier=tier)
            for is_stored, pairs in (
                (True, _with_parents(stored, chain_blocks)),
                (False, reversed(_with_parents(removed, chain_blocks))),
            )
            for block, parent in pairs
        ]
        message = KvEvents(epoch=_EPOCH, sequence=self.next_sequence, events=events)
        self.next_sequence += len(events)
        return FromGroup(events=message)

    def submit(self, request: Request, decision: Decision, attempt: int = 0, *_: Any, **__: Any) -> Submission:
        """Counts the request as sent, in the group's load and in the index. No message is made."""
        self._last_id += 1
        submission = Submission(self, request, decision, self._last_id, attempt)
        self.submissions.add(submission)
        return submission

    def send_abort(self, id: int, choice: int | None) -> None:
        pass

    async def _run(self) -> None:
        pass


class OfflineGroups(GroupRegistry):
    """`members`: the connections of `count` groups that have registered and hold no block.

    Create it inside an event loop. Call `start` once a Dispatcher listens.
    """

    def __init__(self, count: int, blocks_per_group: int) -> None:
        super().__init__(RouterConfig(model="m"))
        self.members = [self._add_group(f"g{place}", blocks_per_group) for place in range(count)]

    def start(self) -> None:
        """Tells the listeners that the groups serve."""
        self.notify()

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of the index or of a load."""
        self.index.check()
        for member in self.members:
            member.load.check()

    def _add_group(self, name: str, blocks: int) -> OfflineConnection:
        connection = OfflineConnection(
            GroupEndpoint(name, "offline:0"),
            self._config,
            self.index,
            self.loads,
            self.failures,
            on_change=lambda: None,
            on_room=lambda: self.on_room(),
            detect_outlier=self._detect_outlier,
        )
        self._connections[name] = connection
        registration = Registration(
            group=name,
            epoch=_EPOCH,
            model=MODEL,
            num_blocks=blocks,
            host_blocks=blocks,
            max_batch_tokens=2048,
            max_num_seqs=_MAX_SEQUENCES,
            contract=CONTRACT,
            version=VERSION,
        )
        connection.receive(FromGroup(registration=registration))
        connection.receive(FromGroup(snapshot=SnapshotChunk(epoch=_EPOCH, first=True, last=True)))
        connection.receive(load_report(blocks))
        return connection


def _with_parents(blocks: Sequence[bytes], chain_blocks: int) -> list[tuple[bytes, bytes]]:
    length = chain_blocks or max(len(blocks), 1)
    return [(block, blocks[place - 1] if place % length else b"") for place, block in enumerate(blocks)]


def load_report(blocks: int, *, waiting: int = 0) -> FromGroup:
    """A load report of a group that works. With `waiting` requests above its limit it has no room."""
    status = GroupStatus(
        running=16,
        waiting=waiting,
        blocks_total=blocks,
        blocks_cached=blocks,
        prefill_tokens_per_second=10_000.0,
        restore_tokens_per_second=100_000.0,
        step_seconds=0.02,
    )
    return FromGroup(load=Load(status=status, queued_prefill_tokens=500))
