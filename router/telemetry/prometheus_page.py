"""PrometheusPage: the /metrics page of a router: its own metrics, and what its groups report.

The metrics of the router's requests are counted as requests end (request_metrics.py); reports are read at each scrape.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, lt
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coatcheck.proto.stubs.coatcheck_pb2 import Evictions, GroupStatus, PrefixMisses, StatusResponse

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
STATES: Final = ("serving", "draining", "drained", "starting", "lost")
# Metrics with one value for each group: (name, help, field of GroupStatus; with a dot, a field of a message in it).
_GAUGES: Final = (
    ("group_running_sequences", "Sequences that run.", "running"),
    ("group_waiting_sequences", "Sequences that wait for blocks or a slot.", "waiting"),
    ("group_slowness_ratio", "Duration of its steps relative to its own usual steps.", "slowness"),
    ("group_step_seconds", "Duration of a decode step, measured lately.", "step_seconds"),
    ("group_block_bytes", "Bytes of a KV block on one rank.", "bytes_per_block"),
    ("group_state_snapshot_slots", "Slots for snapshots of recurrent states.", "state_snapshot_slots"),
    ("group_state_snapshots", "Snapshots of states at which prompts can start.", "state_snapshots_held"),
    (
        "group_prefill_tokens_per_second",
        "Prompt tokens computed per second of prefill, lately.",
        "prefill_tokens_per_second",
    ),
    (
        "group_demote_bytes_per_second",
        "KV copied to host memory per second, on the slowest rank.",
        "demote_bytes_per_second",
    ),
    (
        "group_restore_bytes_per_second",
        "KV copied from host memory per second, on the slowest rank.",
        "restore_bytes_per_second",
    ),
)
_COUNTERS: Final = (
    ("group_state_snapshot_saves", "Copies of recurrent states to snapshots.", "state_snapshot_saves"),
    ("group_state_snapshot_restores", "Sequences that started at a snapshot of states.", "state_snapshot_restores"),
    ("group_state_snapshot_evictions", "Snapshots of states replaced by others.", "state_snapshot_evictions"),
    ("group_prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("group_generated_tokens", "Tokens generated.", "generated_tokens"),
    ("group_draft_tokens", "Draft tokens computed (speculative decoding).", "draft_tokens"),
    ("group_accepted_draft_tokens", "Draft tokens that were right.", "accepted_draft_tokens"),
    ("group_preemptions", "Sequences that had to free their blocks.", "preemptions"),
    ("group_demoted_blocks", "Blocks copied to host memory.", "demotions"),
    ("group_restored_blocks", "Blocks copied back from host memory.", "restores"),
    (
        "group_integrity_failures",
        "Blocks whose checksum was wrong after a copy; they were computed again.",
        "integrity_failures",
    ),
    ("group_late_compiles", "GPU kernels compiled after the ranks had warmed up.", "late_compiles"),
    ("group_restarts", "Starts of the group by the supervisor after the first.", "restarts"),
    ("routing_prompts", "Prompts whose cached tokens were predicted.", "audit.prompts"),
    ("routing_predicted_tokens", "Cached prompt tokens that the router predicted.", "audit.predicted_tokens"),
    ("routing_found_tokens", "Cached prompt tokens that the groups found.", "audit.found_tokens"),
    ("routing_error_tokens", "Sum of the absolute differences, prompt by prompt.", "audit.error_tokens"),
    ("routing_divergences", "Snapshots requested because the predictions were wrong for long.", "audit.divergences"),
)


class PrometheusPage:
    """`report` returns the router's status; `registry` holds the metrics that are counted as they happen."""

    def __init__(self, report: Callable[[], StatusResponse], registry: CollectorRegistry) -> None:
        self._report = report
        self._registry = registry
        self._experts = _ExpertCounts()
        ProcessCollector(registry=registry)

    def render(self) -> bytes:
        """The page, as UTF-8."""
        status, page = self._report(), _Page()
        _add_router(page, status)
        _add_groups(page, status.groups)
        _add_ranks(page, status.groups)
        self._experts.add_to(page, status.groups)
        return generate_latest(self._registry) + page.text().encode()


class _Page:
    """Text in Prometheus' exposition format. prometheus_client takes about ten times as long, too long for each scrape
    of a cluster of many ranks."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        help: str,
        samples: Iterable[tuple[str, float]],
    ) -> None:
        """Adds a metric with its samples, each a pair of labels and value. A counter's name gets its `_total` here."""
        if kind == "counter":
            name += "_total"
        self._lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")
        self._lines += [f"{name}{labels} {value}" for labels, value in samples]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _add_router(page: _Page, status: StatusResponse) -> None:
    """Metrics of the router as one server, with those that the Gateway API inference extension reads."""
    groups, model = status.groups, status.model
    running, waiting = sum(g.running for g in groups), sum(g.waiting for g in groups)
    total, used = sum(g.blocks_total for g in groups), sum(g.blocks_used for g in groups)
    # The extension reads these sizes from labels with vLLM's names.
    sizes = _labels(block_size=str(model.block_size), num_gpu_blocks=str(total))
    served = _labels(model=model.name, dtype=model.dtype, kv_dtype=model.kv_dtype, fingerprint=model.fingerprint[:12])
    for name, text, labels, value in (
        ("active_requests", "Open requests.", "", status.active_streams),
        ("queued_requests", "Requests that wait, in the router or in a group.", "", waiting + status.queued_requests),
        ("router_queued_requests", "Requests that wait in this router.", "", status.queued_requests),
        ("queue_now_seconds", "How long requests wait now until a group has room.", "", status.queue_seconds),
        ("running_requests", "Sequences that run in all groups.", "", running),
        ("kv_utilization_ratio", "Share of all groups' KV blocks that is in use.", "", used / total if total else 0.0),
        ("kv_block_size_tokens", "Tokens per KV block.", "", model.block_size),
        ("kv_blocks", "KV blocks of all groups.", "", total),
        ("cache_hit_ratio", "Share of prompt tokens that was found in a cache.", "", status.hit_ratio),
        ("accepting", "1 while new requests should be sent here.", "", int(status.state == "serving")),
        ("cache_config_info", "Sizes of the KV cache, as labels.", sizes, 1),
        ("model_info", "The model that is served, as labels.", served, 1),
    ):
        page.add("gauge", f"coatcheck_{name}", text, [(labels, value)])


def _add_groups(page: _Page, groups: Sequence[GroupStatus]) -> None:
    named = [(group, _labels(group=group.name)) for group in groups]
    states, blocks, cached = [], [], []
    evicted, missed, moved = list[tuple[str, float]](), list[tuple[str, float]](), list[tuple[str, float]]()
    for group, labels in named:
        prefix = labels[:-1]
        states += [(f'{prefix},state="{state}"}}', int(group.state == state)) for state in STATES]
        free = max(group.blocks_total - group.blocks_used - group.blocks_cached, 0)
        for tier, use, count in (
            ("device", "used", group.blocks_used),
            ("device", "cached", group.blocks_cached),
            ("device", "free", free),
            ("host", "cached", group.host_blocks_used),
            ("host", "free", max(group.host_blocks_total - group.host_blocks_used, 0)),
        ):
            blocks.append((f'{prefix},tier="{tier}",use="{use}"}}', count))
        cached.append((f'{prefix},tier="device"}}', group.cached_device_tokens))
        cached.append((f'{prefix},tier="host"}}', group.cached_host_tokens))
        for tier, evictions in (("device", group.device_evictions), ("host", group.host_evicted)):
            evicted += _by_field(evictions, f'{prefix},tier="{tier}"')
        missed += _by_field(group.prefix_misses, prefix)
        moved.append((f'{prefix},to="host"}}', group.demoted_bytes))
        moved.append((f'{prefix},to="device"}}', group.restored_bytes))
    page.add(
        "counter", "coatcheck_group_evicted_blocks", "Cached blocks that were evicted, by tier and reason.", evicted
    )
    page.add("counter", "coatcheck_group_prefix_misses", "Prompts that were not completely cached, by reason.", missed)
    page.add("counter", "coatcheck_group_moved_bytes", "KV bytes copied between device and host, on all ranks.", moved)
    page.add("gauge", "coatcheck_group_state", "1 for the state of the group.", states)
    page.add("gauge", "coatcheck_group_blocks", "KV blocks, by tier and use.", blocks)
    page.add("counter", "coatcheck_group_cached_tokens", "Prompt tokens found in the cache, by tier.", cached)
    for name, text, field in _GAUGES:
        page.add("gauge", f"coatcheck_{name}", text, _samples(named, field))
    for name, text, field in _COUNTERS:
        page.add("counter", f"coatcheck_{name}", text, _samples(named, field))


def _samples(named: Sequence[tuple[GroupStatus, str]], field: str) -> list[tuple[str, float]]:
    value_of = attrgetter(field)
    return [(labels, value_of(group)) for group, labels in named]


def _by_field(counts: Evictions | PrefixMisses, prefix: str) -> list[tuple[str, float]]:
    """A sample for each field of the message; the fields' names are the reasons."""
    names = [field.name for field in counts.DESCRIPTOR.fields]
    return [(f'{prefix},reason="{name}"}}', getattr(counts, name)) for name in names]


def _add_ranks(page: _Page, groups: Sequence[GroupStatus]) -> None:
    healthy, memory, weights, steps = [], [], [], []
    for group in groups:
        prefix = _labels(group=group.name)[:-1]
        for rank in group.ranks:
            labels = f'{prefix},rank="{rank.rank}"}}'
            healthy.append((f"{labels[:-1]},{_labels(node=rank.node)[1:]}", int(rank.healthy)))
            memory.append((labels, rank.peak_memory_bytes))
            weights.append((labels, rank.weight_bytes))
            steps.append((labels, rank.steps))
    page.add("gauge", "coatcheck_rank_healthy", "1 while the rank works.", healthy)
    page.add("gauge", "coatcheck_rank_peak_memory_bytes", "Peak device memory so far.", memory)
    page.add("gauge", "coatcheck_rank_weight_bytes", "Bytes of the rank's weights, as they are stored.", weights)
    page.add("counter", "coatcheck_rank_steps", "Steps that the rank has computed.", steps)


class _ExpertCounts:
    """The tokens of each expert over all groups, so that the number of series does not grow with the groups.

    The sums keep the counts of groups that are lost or have restarted. Without them the counter would fall. Prometheus
    takes a fall for a restart at 0, so rate() would add the whole remaining sum.
    """

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._last: dict[str, list[int]] = {}  # by group: its counts at the last scrape

    def add_to(self, page: _Page, groups: Sequence[GroupStatus]) -> None:
        for group in groups:
            if group.expert_tokens:
                self._update(group.name, list(group.expert_tokens))
        samples = [(_labels(expert=str(expert)), tokens) for expert, tokens in enumerate(self._sums)]
        if samples:
            text = "Tokens that chose the expert, over all layers and groups."
            page.add("counter", "coatcheck_expert_tokens", text, samples)

    def _update(self, name: str, counts: list[int]) -> None:
        last = self._last.get(name, [])
        has_restarted = len(last) != len(counts) or any(map(lt, counts, last))
        self._sums += [0] * (len(counts) - len(self._sums))
        for expert, tokens in enumerate(counts):
            self._sums[expert] += tokens if has_restarted else tokens - last[expert]
        self._last[name] = counts


def _labels(**pairs: str) -> str:
    """`pairs` as labels in the exposition format: {name="value",...}."""
    return "{" + ",".join([f'{name}="{text.translate(_ESCAPES)}"' for name, text in pairs.items()]) + "}"
