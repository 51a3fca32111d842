"""The first steps of a group: every rank computes a prefill and a decode before anything is promised.

On a GPU `kernel_plans` go before them: between them they launch every kernel that serving can ask for. The keys of
kernels depend on model and pool, and beside those only on how long a chunk is and what the sampler is asked for.

The plans are made by hand, so that no counter, block or event remembers them. Not known here: the engine.
"""

from collections.abc import Iterable, Iterator

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.step_plan import NewRow, Row, StepPlan, TableWrite

_WARM_UP_BLOCKS = 8

_GREEDY = SamplingParams(temperature=0.0, seed=0)
# Each takes another way through the sampler.
_SAMPLINGS = (
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(seed=0, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(seed=0, temperature=0.0, logit_bias={0: 1.0}, logprobs=2, prompt_logprobs=1),
)


def warm_up_plans(*, num_tokens: int, block_size: int) -> Iterator[StepPlan]:
    """A prompt of `num_tokens` - 1 in slot 0 and blocks 0, 1, ..., then a decode. The next NewRow overwrites it all."""
    prompt = max(1, num_tokens - 1)
    yield _first(prompt, _GREEDY, block_size)
    if num_tokens > prompt:
        yield _next(prompt, _GREEDY, block_size)


def kernel_plans(*, chunk_lengths: Iterable[int], room: int, num_blocks: int, block_size: int) -> Iterator[StepPlan]:
    """Chunks of these lengths, which between them take every launch, a decode after each, every way of sampling, and a
    copy; none needs more than `room` tokens in a step or a sequence."""
    for length in (1, *chunk_lengths):
        if length < room:
            yield _first(length, _GREEDY, block_size)
            yield _next(length, _GREEDY, block_size)
    for sampling in _SAMPLINGS if room > 2 else ():
        yield _first(2, sampling, block_size)
        yield _next(2, sampling, block_size)
        yield _next(2, sampling, block_size, sample=False)
    if num_blocks > 1:
        yield StepPlan(copies=[(0, 1)], rows=[Row(0, 0, 1, sample=False)])


def _first(prompt: int, sampling: SamplingParams, block_size: int) -> StepPlan:
    """A prompt in slot 0."""
    return _step(prompt, prompt, Row(0, 0, prompt, sample=True), sampling, block_size)


def _next(prompt: int, sampling: SamplingParams, block_size: int, *, sample: bool = True) -> StepPlan:
    """The token behind a prompt that has been computed; it is given, so that no step depends on another's draw."""
    return _step(prompt, prompt + 1, Row(0, prompt, 1, sample), sampling, block_size)


def _step(prompt: int, num_tokens: int, row: Row, sampling: SamplingParams, block_size: int) -> StepPlan:
    new = NewRow(0, 0, prompt, [0] * num_tokens, sampling, ())
    writes = [TableWrite(0, index, index) for index in range(-(-num_tokens // block_size))]
    return StepPlan(new_rows=[new], table_writes=writes, rows=[row])


def copy_warm_up_plans(num_blocks: int) -> Iterator[StepPlan]:
    """The first few blocks to the host and back, twice, so that both ways are measured before the first decision."""
    pairs = [(index, index) for index in range(min(num_blocks, _WARM_UP_BLOCKS))]
    for _ in range(2 if pairs else 0):
        yield StepPlan(demotes=pairs)
        yield StepPlan(restores=pairs)
