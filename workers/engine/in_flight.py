"""InFlight: a step that the ranks are computing, and what its result says of each of its sequences.

Between its plan and its result a sequence may be preempted, and then what was computed is lost; or be gone, and then
nothing of it counts. It does not know blocks, nor what is told of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coatcheck.workers.core.runner_protocol import LaunchedStep, StepResult
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import Row, StepPlan


@dataclass(slots=True)
class InFlight:
    """`sequences` are those of the plan's rows; `started` is when the plan was made."""

    plan: StepPlan
    sequences: list[Sequence]
    launched: LaunchedStep
    started: float
    _preemptions: list[int] = field(init=False)  # of each sequence when planned

    def __post_init__(self) -> None:
        self._preemptions = [sequence.num_preemptions for sequence in self.sequences]

    def confirm(self, result: StepResult) -> Iterator[tuple[int, Row, Sequence]]:
        """Notes what is computed and what was drawn, row by row, for each sequence that is still here when it is its
        turn, and hands it over with its row's index; of one whose row has failed nothing is noted."""
        for index, (row, sequence) in enumerate(zip(self.plan.rows, self.sequences, strict=True)):
            sequence.num_pending -= int(row.sample)
            sequence.started_at = sequence.started_at or self.started
            if sequence.gone:
                continue
            if index not in result.failed:
                if row.sample:
                    sequence.token_ids.append(result.token_ids[index])
                if sequence.num_preemptions == self._preemptions[index]:
                    sequence.num_computed = row.start + row.num_tokens
            yield index, row, sequence
