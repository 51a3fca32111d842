"""SimulatedTiers: the KV blocks of a simulated group on the device and in the host tier.

A sequence holds blocks for its prompt and its answer while it runs. Afterwards its prompt's full blocks stay cached
until other sequences need them. The least recently used are evicted first, the deepest first within a prompt. Evicted
blocks go to the host tier, if there is one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from coatcheck.bench.routing_simulation.service_model import SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_index import BlockHolders, remove_bit


class SimulatedTiers:
    """For a job: `allocate_blocks` at its begin, `register_blocks` after its prefill, `release_blocks` at its end."""

    def __init__(self, bit: int, holders: BlockHolders, blocks: int, host_blocks: int) -> None:
        self._bit = bit  # of this group
        self._on_device, self._on_host = holders.on_device, holders.on_host
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._free = blocks
        self._refs: dict[bytes, int] = {}  # registered blocks that jobs hold, with the number of jobs
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()

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

    def match_prefix(self, chain: Iterable[bytes]) -> tuple[int, int]:
        """(device blocks, blocks on the host alone) of the chain, up to its first block that is on neither."""
        device = host = 0
        refs, cached = self._refs, self._cached
        for block in chain:
            if block in refs or block in cached:
                device += 1
            elif block in self._host:
                host += 1
            else:
                break
        return device, host

    def available_beside(self, found: Sequence[bytes]) -> int:
        """Blocks that a job can allocate beside the cached blocks that it has found."""
        cached = self._cached
        return self._free + len(cached) - sum([block in cached for block in found])

    def allocate_blocks(self, job: SimulatedRequest, matched: int, fresh: int) -> None:
        """Share the first `matched` blocks of the job's chain, found in any tier, and allocate `fresh` device blocks,
        some of them for the blocks found on the host alone."""
        refs, cached, host = self._refs, self._cached, self._host
        job.held = list(job.chain[:matched])
        restored = [block for block in job.held if block not in refs and block not in cached] if host else []
        for block in job.held:
            if block in refs:
                refs[block] += 1
            else:
                cached.pop(block, None)
                refs[block] = 1
            if block in host:
                host.move_to_end(block)
        for block in restored:
            self._on_device[block] = self._on_device.get(block, 0) | self._bit
        self._allocate(fresh)
        job.unregistered = fresh - len(restored)

    def register_blocks(self, job: SimulatedRequest) -> None:
        """Register the blocks of the job's computed prompt."""
        refs, on_device, bit = self._refs, self._on_device, self._bit
        for block in job.chain[len(job.held) :]:
            if job.unregistered <= 0:
                break  # a pool too small for it
            if block in refs:  # another job computed the same block: share it, free ours
                refs[block] += 1
                self._free += 1
            elif block in self._cached:
                del self._cached[block]
                refs[block] = 1
                self._free += 1
            else:
                refs[block] = 1
                on_device[block] = on_device.get(block, 0) | bit
            job.unregistered -= 1
            job.held.append(block)

    def release_blocks(self, job: SimulatedRequest) -> None:
        refs, cached = self._refs, self._cached
        for block in reversed(job.held):
            if (count := refs[block]) > 1:
                refs[block] = count - 1
            else:
                del refs[block]
                cached[block] = None
        self._free += job.unregistered
        job.unregistered = 0
        job.held = []

    def check(self, jobs: Iterable[SimulatedRequest]) -> None:
        """Raises AssertionError on a broken invariant; `jobs` are those that hold blocks."""
        unregistered = sum(job.unregistered for job in jobs)
        assert self._free + len(self._cached) + len(self._refs) + unregistered == self._blocks
        assert self._free >= 0 and not self._refs.keys() & self._cached.keys()
        assert len(self._host) <= self._host_blocks
        on_device = {block for block, groups in self._on_device.items() if groups & self._bit}
        assert on_device == self._refs.keys() | self._cached.keys()
        assert {block for block, groups in self._on_host.items() if groups & self._bit} == self._host.keys()

    def _allocate(self, count: int) -> None:
        given = min(count, self._free)
        self._free -= given
        for _ in range(count - given):
            block, _ = self._cached.popitem(last=False)
            remove_bit(self._on_device, block, self._bit)
            if self._host_blocks and block not in self._host:
                if len(self._host) >= self._host_blocks:
                    gone, _ = self._host.popitem(last=False)
                    remove_bit(self._on_host, gone, self._bit)
                self._host[block] = None
                self._on_host[block] = self._on_host.get(block, 0) | self._bit
