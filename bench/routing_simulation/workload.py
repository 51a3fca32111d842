"""Workload: the requests of a trace, prepared for many runs; and the parts of each trace.

Rules with a weight are tuned on the training part, and everything is measured on the measured part. Of a published
trace the first third of the requests is the training part and the rest the measured part. Of a made-up workload they
are requests of two seeds. Constants of ours may be chosen on training parts only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.workloads import WORKLOADS
from coatcheck.bench.setup.public_traces import AZURE, CONVERSATION, SYNTHETIC
from coatcheck.cluster.benchmark.request_trace import TraceEntry, read_trace
from coatcheck.proto.block_hash import HASH_BYTES

FILES: Final = {"conversation": CONVERSATION, "synthetic": SYNTHETIC, "azure": AZURE}
_MADE_UP_TRAINING: Final = 2500  # requests of a made-up training part, which is run once for each weight


class Part(Enum):
    """A part of a workload. The values are the seeds of made-up workloads, of which several are measured."""

    TRAINING = 1
    MEASURED = 2
    MEASURED_SECOND = 3
    MEASURED_THIRD = 4


class Workload:
    """The requests of a trace with the hashes of their blocks, made once and shared by all runs. `entries` begin at
    time 0."""

    def __init__(self, entries: Sequence[TraceEntry]) -> None:
        self.entries = entries
        hashes: dict[int, bytes] = {}  # equal blocks are one object, which dictionaries find without comparing bytes
        # A prompt's last token is always computed, so a block that ends with it is never looked up.
        self.chains = [
            tuple(
                [
                    hashes.setdefault(block, block.to_bytes(HASH_BYTES, "little"))
                    for block in entry.blocks[: (entry.input_len - 1) // BLOCK]
                ]
            )
            for entry in entries
        ]
        self.digest = blake2b(repr(entries).encode(), digest_size=8).hexdigest()
        self._pooled_hits: dict[int, list[int]] = {}

    def pooled_hits(self, blocks: int) -> list[int]:
        """Prompt tokens of each request that are found in one LRU cache of `blocks` blocks."""
        if blocks not in self._pooled_hits:
            self._pooled_hits[blocks] = _pooled_hits(self.chains, blocks)
        return self._pooled_hits[blocks]

    def jobs(self, models: Sequence[ServiceModel], load: float) -> list[SimulatedRequest]:
        """New requests, sped up to `load`. A group's capacity is in proportion to its prefill rate."""
        entries, model = self.entries, models[0]
        hits = self.pooled_hits(pooled_blocks(models))
        work = sum(
            model.work(entry.input_len - hit, 0, entry.input_len + entry.output_len // 2, entry.output_len)
            for entry, hit in zip(entries, hits, strict=True)
        )
        capacity = sum(group.prefill_rate for group in models) / model.prefill_rate
        speed = load * capacity * entries[-1].at / work
        return [
            SimulatedRequest(entry.at / speed, entry.input_len, max(entry.output_len, 1), chain)
            for entry, chain in zip(entries, self.chains, strict=True)
        ]


def pooled_blocks(models: Sequence[ServiceModel]) -> int:
    """Blocks of all groups in both tiers."""
    return sum(model.blocks + model.host_blocks for model in models)


def _pooled_hits(chains: Sequence[Sequence[bytes]], blocks: int) -> list[int]:
    held: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for chain in chains:
        hits.append(next((place for place, block in enumerate(chain) if block not in held), len(chain)) * BLOCK)
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits


@lru_cache(maxsize=4)  # cells of one workload follow each other
def measured_parts(name: str) -> Sequence[Part]:
    """The parts of the workload `name` that are measured. Of a trace there is one."""
    return [Part.MEASURED, Part.MEASURED_SECOND, Part.MEASURED_THIRD] if name in WORKLOADS else [Part.MEASURED]


def load_part(name: str, part: Part, traces: Path) -> Workload:
    """A part of the workload `name`. `traces`: the folder of the published traces."""
    if name in WORKLOADS:
        entries = WORKLOADS[name](part.value)
        return Workload(entries[:_MADE_UP_TRAINING] if part is Part.TRAINING else entries)
    entries = read_trace(traces / FILES[name])
    third = len(entries) // 3
    entries = entries[:third] if part is Part.TRAINING else entries[third:]
    first = entries[0].at
    return Workload([TraceEntry(e.at - first, e.input_len, e.output_len, e.blocks) for e in entries])
