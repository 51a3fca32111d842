"""GroupReport: what a group says of itself on the wire, from what it is and from what its engine has counted.

It does not know when it is asked for, nor by whom.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason
from coatcheck.workers.core.step_output import EngineStats

_Counts = TypeVar("_Counts", public.Evictions, public.PrefixMisses)


@dataclass(frozen=True, slots=True, eq=False)
class GroupReport:
    """`ranks` as they were once warm; `compiled` says how many kernels there have been since."""

    registration: wire.Registration
    ranks: Sequence[public.RankStatus]
    kernels: str = ""
    bytes_per_block: int = 0
    compiled: Callable[[], int] = int

    def status(self, stats: EngineStats, address: str) -> public.GroupStatus:
        """State, reason and restarts are for those who watch it."""
        block_size = self.registration.model.block_size
        status = public.GroupStatus(
            name=self.registration.group,
            state="serving",
            address=address,
            ranks=self.ranks,
            running=stats.running,
            waiting=stats.waiting,
            blocks_total=stats.blocks_total,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            prompt_tokens=stats.prompt_tokens,
            cached_device_tokens=stats.cached_device_tokens,
            cached_host_tokens=stats.cached_host_tokens,
            generated_tokens=stats.generated_tokens,
            preemptions=stats.preemptions,
            prefill_tokens_per_second=stats.prefill_tokens_per_second,
            step_seconds=stats.step_seconds,
            slowness=stats.slowness,
            kernels=self.kernels,
            host_blocks_total=stats.host_blocks_total,
            host_blocks_used=stats.host_blocks_used,
            demotions=stats.demotions,
            restores=stats.restores,
            integrity_failures=stats.integrity_failures,
            host_evictions=sum(stats.host_evictions.values()),
            device_evictions=_by_reason(public.Evictions(), stats.device_evictions),
            host_evicted=_by_reason(public.Evictions(), stats.host_evictions),
            prefix_misses=_by_reason(public.PrefixMisses(), stats.prefix_misses),
            demoted_bytes=stats.demotions * self.bytes_per_block * len(self.ranks),
            restored_bytes=stats.restores * self.bytes_per_block * len(self.ranks),
            bytes_per_block=self.bytes_per_block,
            late_compiles=self.compiled(),
            demote_bytes_per_second=self.bytes_per_block / stats.demote_seconds if stats.demote_seconds else 0.0,
            restore_bytes_per_second=self.bytes_per_block / stats.restore_seconds if stats.restore_seconds else 0.0,
            restore_tokens_per_second=block_size / stats.restore_seconds if stats.restore_seconds else 0.0,
        )
        for rank in status.ranks:
            rank.steps = stats.steps  # ranks step together or not at all
        return status

    def load(self, stats: EngineStats, address: str, submissions: int) -> wire.Load:
        """The load report for one router. `submissions`: how many of that router's submissions the stats include."""
        return wire.Load(
            status=self.status(stats, address),
            queued_prefill_tokens=stats.queued_prefill_tokens,
            prefill_seconds=stats.prefill_seconds,
            submissions=submissions,
        )


def _by_reason(message: _Counts, counts: Mapping[EvictionReason, int] | Mapping[MissReason, int]) -> _Counts:
    """Filled: its fields are named as the reasons are."""
    for reason, count in counts.items():
        setattr(message, reason.name.lower(), count)
    return message
