"""SimulatedTiers: the KV blocks of a simulated group on the device and in the host tier, and their KvEvents.

A sequence holds blocks for its prompt and its answer while it runs. Afterwards its prompt's full blocks stay cached
until other sequences need them. The least recently used are evicted first, the deepest first within a prompt. Evicted
blocks go to the host tier, if there is one.
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
    """For a job: `allocate_blocks` at its begin, `register_blocks` after its prefill, `release_blocks` at its end."""

    def __init__(self, epoch: str, blocks: int, host_blocks: int) -> None:
        self._epoch = epoch
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._free = blocks
        self._refs: dict[int, int] = {}  # registered blocks that jobs hold, with the number of jobs
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._sequence = 0
        self._events: list[KvEvent] = []

    @property
    def in_use(self) -> int:
        """Device blocks that jobs hold."""
        return self._blocks - self._free - len(self._cached)

    @property
    def allocated(self) -> int:
        """Device blocks that are not free."""
        return self._blocks - self._free

    @property
    def cached(self) -> int:
        """Cached device blocks that no job holds."""
        return len(self._cached)

    @property
    def host_held(self) -> int:
        """Blocks of the host tier."""
        return len(self._host)

    def match_prefix(self, chain: Iterable[int]) -> tuple[int, int]:
        """(device blocks, blocks on the host alone) of the chain, up to its first block that is on neither."""
        device = host = 0
        for block in chain:
            if block in self._refs or block in self._cached:
                device += 1
            elif block in self._host:
                host += 1
            else:
                break
        return device, host

    def available_beside(self, found: Sequence[int]) -> int:
        """Blocks that a job can allocate beside the cached blocks that it has found."""
        return self._free + len(self._cached) - sum(1 for block in found if block in self._cached)

    def allocate_blocks(self, job: SimulatedRequest, matched: int, fresh: int) -> None:
        """Share the first `matched` blocks of the job's chain, found in any tier, and allocate `fresh` device blocks,
        some of them for the blocks found on the host alone."""
        restored = [block for block in job.chain[:matched] if block not in self._refs and block not in self._cached]
        for block in job.chain[:matched]:
            if block in self._refs:
                self._refs[block] += 1
            else:
                self._cached.pop(block, None)
                self._refs[block] = 1
            if block in self._host:
                self._host.move_to_end(block)
        job.held = list(job.chain[:matched])
        for block in restored:
            self._events.append(_event(block, TIER_DEVICE, True))
        self._allocate(fresh)
        job.unregistered = fresh - len(restored)

    def register_blocks(self, job: SimulatedRequest) -> None:
        """Register the blocks of the job's computed prompt."""
        for block in job.chain[len(job.held) :]:
            if job.unregistered <= 0:
                break  # a pool too small for it
            if block in self._refs:  # another job computed the same block: share it, free ours
                self._refs[block] += 1
                self._free += 1
            elif block in self._cached:
                del self._cached[block]
                self._refs[block] = 1
                self._free += 1
            else:
                self._refs[block] = 1
                self._events.append(_event(block, TIER_DEVICE, True))
            job.unregistered -= 1
            job.held.append(block)

    def release_blocks(self, job: SimulatedRequest) -> None:
        for block in reversed(job.held):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._cached[block] = None
        self._free += job.unregistered
        job.unregistered = 0
        job.held = []

    def drain_events(self) -> KvEvents | None:
        """The blocks stored and removed since the last call."""
        if not self._events:
            return None
        message = KvEvents(epoch=self._epoch, sequence=self._sequence, events=self._events)
        self._sequence += len(self._events)
        self._events = []
        return message

    def check(self, jobs: Iterable[SimulatedRequest]) -> None:
        """Raises AssertionError on a broken invariant; `jobs` are those that hold blocks."""
        unregistered = sum(job.unregistered for job in jobs)
        assert self._free + len(self._cached) + len(self._refs) + unregistered == self._blocks
        assert self._free >= 0 and not self._refs.keys() & self._cached.keys()
        assert len(self._host) <= self._host_blocks

    def _allocate(self, count: int) -> None:
        given = min(count, self._free)
        self._free -= given
        for _ in range(count - given):
            block, _ = self._cached.popitem(last=False)
            self._events.append(_event(block, TIER_DEVICE, False))
            if self._host_blocks and block not in self._host:
                if len(self._host) >= self._host_blocks:
                    gone, _ = self._host.popitem(last=False)
                    self._events.append(_event(gone, TIER_HOST, False))
                self._host[block] = None
                self._events.append(_event(block, TIER_HOST, True))
