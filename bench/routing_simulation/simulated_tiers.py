"""SimulatedTiers: the blocks of a simulated group: on the device held or cold, on the host, and the events that tell.

A sequence holds blocks for its prompt and its answer while it runs; then its prompt's full blocks stay, cold, until
others need the room: least recently used first, deepest first within a prompt. What leaves the device goes to the host
tier, if there is one. It does not know time, queues, nor who decides what is held.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from coatcheck.bench.routing_simulation.service_model import SimulatedRequest
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, TIER_HOST, KvEvent, KvEvents

_STORED: dict[tuple[int, int], KvEvent] = {}
_REMOVED: dict[tuple[int, int], KvEvent] = {}


def block_name(block: int) -> bytes:
    """The hash of a block that the trace names by a number."""
    return block.to_bytes(16, "little")


def _event(block: int, tier: int, stored: bool) -> KvEvent:
    known = _STORED if stored else _REMOVED
    event = known.get((block, tier))
    if event is None:
        event = known[block, tier] = KvEvent(stored=stored, block_hash=block_name(block), tier=tier)  # type: ignore[arg-type]
    return event


class SimulatedTiers:
    """`hold` when a job begins, `name` when its prompt is computed, `release` when it ends."""

    def __init__(self, epoch: str, blocks: int, host_blocks: int) -> None:
        self._epoch = epoch
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._free = blocks
        self._refs: dict[int, int] = {}  # named blocks that somebody holds
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._sequence = 0
        self._events: list[KvEvent] = []

    @property
    def in_use(self) -> int:
        """Device blocks that jobs hold."""
        return self._blocks - self._free - len(self._cold)

    @property
    def held(self) -> int:
        """Device blocks that are not free."""
        return self._blocks - self._free

    @property
    def cold(self) -> int:
        """Device blocks that stay though nobody holds them."""
        return len(self._cold)

    @property
    def host_held(self) -> int:
        """Blocks of the host tier."""
        return len(self._host)

    def match(self, chain: Iterable[int]) -> tuple[int, int]:
        """Blocks of it, up to the first that is nowhere: on the device, and on the host alone; as a router's index
        counts them."""
        device = host = 0
        for block in chain:
            if block in self._refs or block in self._cold:
                device += 1
            elif block in self._host:
                host += 1
            else:
                break
        return device, host

    def room_beside(self, found: Sequence[int]) -> int:
        """Blocks that a job may have beside those it has found."""
        return self._free + len(self._cold) - sum(1 for block in found if block in self._cold)

    def hold(self, job: SimulatedRequest, matched: int, fresh: int) -> None:
        """The job begins with so many blocks of its chain, found in any tier, and so many taken on the device: those
        found on the host alone come into some of them."""
        restored = [block for block in job.chain[:matched] if block not in self._refs and block not in self._cold]
        for block in job.chain[:matched]:
            if block in self._refs:
                self._refs[block] += 1
            else:
                self._cold.pop(block, None)
                self._refs[block] = 1
            if block in self._host:
                self._host.move_to_end(block)
        job.held = list(job.chain[:matched])
        for block in restored:
            self._events.append(_event(block, TIER_DEVICE, True))
        self._take(fresh)
        job.anonymous = fresh - len(restored)

    def name(self, job: SimulatedRequest) -> None:
        """The job's prompt is computed: its blocks get their names."""
        for block in job.chain[len(job.held) :]:
            if job.anonymous <= 0:
                break  # a pool too small for it
            if block in self._refs:  # another one computed the same meanwhile: it is shared, ours is given up
                self._refs[block] += 1
                self._free += 1
            elif block in self._cold:
                del self._cold[block]
                self._refs[block] = 1
                self._free += 1
            else:
                self._refs[block] = 1
                self._events.append(_event(block, TIER_DEVICE, True))
            job.anonymous -= 1
            job.held.append(block)

    def release(self, job: SimulatedRequest) -> None:
        """The job has ended."""
        for block in reversed(job.held):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._cold[block] = None
        self._free += job.anonymous
        job.anonymous = 0
        job.held = []

    def drain_events(self) -> KvEvents | None:
        """What was stored and removed since the last call."""
        if not self._events:
            return None
        message = KvEvents(epoch=self._epoch, sequence=self._sequence, events=self._events)
        self._sequence += len(self._events)
        self._events = []
        return message

    def check(self, jobs: Iterable[SimulatedRequest]) -> None:
        """Raises AssertionError on a broken invariant; `jobs` are those that hold blocks."""
        anonymous = sum(job.anonymous for job in jobs)
        assert self._free + len(self._cold) + len(self._refs) + anonymous == self._blocks
        assert self._free >= 0 and not self._refs.keys() & self._cold.keys()
        assert len(self._host) <= self._host_blocks

    def _take(self, count: int) -> None:
        given = min(count, self._free)
        self._free -= given
        for _ in range(count - given):
            block, _ = self._cold.popitem(last=False)
            self._events.append(_event(block, TIER_DEVICE, False))
            if self._host_blocks and block not in self._host:
                if len(self._host) >= self._host_blocks:
                    gone, _ = self._host.popitem(last=False)
                    self._events.append(_event(gone, TIER_HOST, False))
                self._host[block] = None
                self._events.append(_event(block, TIER_HOST, True))
