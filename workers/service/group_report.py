"""GroupReport and LoadReportSchedule: what a group reports to its routers, and when.

A load report is sent after a step that changed something, about once a second while nothing changes, and repeatedly
during a long step, because routers take a group without load reports for stuck.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason
from coatcheck.workers.core.step_output import EngineStats
from coatcheck.workers.engine.engine_loop import HEARTBEAT_SECONDS
from coatcheck.workers.engine.step_watchdog import longest_step_seconds

LOAD_SECONDS: Final = 0.1
_IDLE_LOAD_SECONDS: Final = 1.0
# A step is long, but not stuck, up to `_SHORTEST_STUCK_SECONDS` plus longest_step_seconds.
_SHORTEST_STUCK_SECONDS: Final = 3.0

# The counts that EngineStats and GroupStatus have under the same name.
_COUNTS: Final = (
    "running", "waiting", "blocks_total", "blocks_used", "blocks_cached", "prompt_tokens", "cached_device_tokens",
    "cached_host_tokens", "generated_tokens", "preemptions", "prefill_tokens_per_second", "step_seconds", "slowness",
    "host_blocks_total", "host_blocks_used", "demotions", "restores", "integrity_failures",
    "draft_tokens", "accepted_draft_tokens",
)  # fmt: skip
_ByReason = TypeVar("_ByReason", public.Evictions, public.PrefixMisses)


@dataclass(frozen=True, slots=True, eq=False)
class GroupReport:
    """What a group is, and its engine's counts as protobuf messages.

    `ranks`: their status after the warm-up. `count_late_compiles`: returns how many kernels were compiled since then.
    `expert_tokens`: returns how many tokens chose each expert. `started_at`: of time.monotonic.
    """

    registration: wire.Registration
    ranks: Sequence[public.RankStatus]
    kernels: str = ""
    bytes_per_block: int = 0
    count_late_compiles: Callable[[], int] = int
    replicates_latents: bool = False
    divides_latents: bool = False
    expert_tokens: Callable[[], Sequence[int]] = tuple
    started_at: float = field(default_factory=time.monotonic)

    def build_status(self, stats: EngineStats, address: str) -> public.GroupStatus:
        """The group's status. The router fills in state, reason and restarts where they differ."""
        block_size = self.registration.model.block_size
        copied_bytes = self.bytes_per_block * len(self.ranks)  # by one demotion or restore
        status = public.GroupStatus(
            name=self.registration.group,
            state="serving",
            address=address,
            ranks=self.ranks,
            kernels=self.kernels,
            host_evictions=sum(stats.host_evictions.values()),
            device_evictions=_fill_counts(public.Evictions(), stats.device_evictions),
            host_evicted=_fill_counts(public.Evictions(), stats.host_evictions),
            prefix_misses=_fill_counts(public.PrefixMisses(), stats.prefix_misses),
            demoted_bytes=stats.demotions * copied_bytes,
            restored_bytes=stats.restores * copied_bytes,
            bytes_per_block=self.bytes_per_block,
            late_compiles=self.count_late_compiles(),
            replicates_latents=self.replicates_latents,
            divides_latents=self.divides_latents,
            expert_tokens=self.expert_tokens(),
            uptime_seconds=time.monotonic() - self.started_at,
            demote_bytes_per_second=self.bytes_per_block / stats.demote_seconds if stats.demote_seconds else 0.0,
            restore_bytes_per_second=self.bytes_per_block / stats.restore_seconds if stats.restore_seconds else 0.0,
            restore_tokens_per_second=block_size / stats.restore_seconds if stats.restore_seconds else 0.0,
            state_snapshot_slots=stats.snapshots.slots,
            state_snapshots_held=stats.snapshots.held,
            state_snapshot_saves=stats.snapshots.saves,
            state_snapshot_restores=stats.snapshots.restores,
            state_snapshot_evictions=stats.snapshots.evictions,
            **{name: getattr(stats, name) for name in _COUNTS},
        )
        for rank in status.ranks:
            rank.steps = stats.steps  # ranks step together
        return status

    def build_load(self, stats: EngineStats, address: str, submissions: int, all_submissions: int) -> wire.Load:
        """The load report for one router. `submissions`: number of the router's submissions that the stats include.
        `all_submissions`: those of all routers since the start."""
        return wire.Load(
            status=self.build_status(stats, address),
            queued_prefill_tokens=stats.queued_prefill_tokens,
            prefill_seconds=stats.prefill_seconds,
            submissions=submissions,
            all_submissions=all_submissions,
        )


def _fill_counts(message: _ByReason, counts: Mapping[EvictionReason, int] | Mapping[MissReason, int]) -> _ByReason:
    """Fill `message`, whose fields have the reasons' names."""
    for reason, count in counts.items():
        setattr(message, reason.name.lower(), count)
    return message


class LoadReportSchedule:
    """Decides every LOAD_SECONDS whether a load report is due."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._sent: EngineStats | None = None
        self._sent_at = 0.0

    def is_due(self, stats: EngineStats, now: float, step_age: float) -> bool:
        """Whether to send `stats` now. True also records them as sent. `stats`: after the last step, which ended
        `step_age` seconds ago. `now` in seconds."""
        if stats is self._sent and not self._is_long_step(stats, step_age):
            return False
        if self._is_unchanged(stats) and now - self._sent_at < _IDLE_LOAD_SECONDS - LOAD_SECONDS:
            return False
        self._sent, self._sent_at = stats, now
        return True

    def _is_unchanged(self, stats: EngineStats) -> bool:
        before = self._sent
        return before is not None and (stats.running, stats.waiting, stats.generated_tokens) == (
            before.running,
            before.waiting,
            before.generated_tokens,
        )

    def _is_long_step(self, stats: EngineStats, age: float) -> bool:
        """Whether the present step takes longer than a heartbeat and may still end: a full prefill on a CPU
        takes seconds."""
        longest = longest_step_seconds(stats.prefill_tokens_per_second, self._max_batch_tokens)
        return 2 * HEARTBEAT_SECONDS < age < _SHORTEST_STUCK_SECONDS + longest
