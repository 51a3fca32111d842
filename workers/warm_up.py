"""The first steps of a group: every rank computes a prefill and a decode before anything is promised.

The plans are made by hand, so that no counter, block or event remembers them. Not known here: the engine.
"""

from collections.abc import Iterator

from ..proto.sampling import SamplingParams
from .step_plan import NewRow, Row, StepPlan, TableWrite

_WARM_UP_BLOCKS = 8


def warm_up_plans(*, num_tokens: int, block_size: int) -> Iterator[StepPlan]:
    """A prompt of `num_tokens` - 1 in slot 0 and blocks 0, 1, ..., then a decode. The next NewRow overwrites it all."""
    prompt = max(1, num_tokens - 1)
    new = NewRow(0, 0, prompt, [0] * prompt, SamplingParams(temperature=0.0, seed=0), ())
    writes = [TableWrite(0, index, index) for index in range(-(-num_tokens // block_size))]
    yield StepPlan(new_rows=[new], table_writes=writes, rows=[Row(0, 0, prompt, sample=True)])
    if num_tokens > prompt:
        yield StepPlan(rows=[Row(0, prompt, 1, sample=True)])


def copy_warm_up_plans(num_blocks: int) -> Iterator[StepPlan]:
    """The first few blocks to the host and back, twice, so that both ways are measured before the first decision."""
    pairs = [(index, index) for index in range(min(num_blocks, _WARM_UP_BLOCKS))]
    for _ in range(2 if pairs else 0):
        yield StepPlan(demotes=pairs)
        yield StepPlan(restores=pairs)
