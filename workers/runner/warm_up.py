"""The plans that every rank computes before the group serves.

- `warm_up_plans`, on a CPU: a prefill and a decode.
- `largest_plans`, on a GPU: the steps that take the most memory. The KV pool is sized by them.
- `kernel_plans`, on a GPU: every Triton kernel in every variant that serving can need, so that none compiles later.
  Variants depend on model and pool, on a chunk's length, and on what the sampler is asked for.
- `copy_warm_up_plans`: copies to the host tier and back, so that both directions are measured.

The plans bypass the scheduler: no statistic counts them, and no block is allocated.
"""

from collections.abc import Iterable, Iterator

from coatcheck.proto.sampling import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite

_NUM_COPIED_BLOCKS = 8
_SPLIT_TOKENS = 2048  # of which attention makes several splits, in every mode

_GREEDY = SamplingParams(temperature=0.0, seed=0)
# Each uses different kernels of the sampler.
_SAMPLINGS = (
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_k=5, min_p=0.01),
    SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(seed=0, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(seed=0, temperature=0.0, logit_bias={0: 1.0}, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=0, temperature=0.0, logprobs=ALL_LOGPROBS, prompt_logprobs=ALL_LOGPROBS),
    SamplingParams(seed=0, temperature=0.0, logprobs=MAX_LOGPROBS + 1),
    SamplingParams(seed=0, temperature=0.0, logprobs=0, logprob_token_ids=(0,)),
)

_COSTLIEST = SamplingParams(
    seed=0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS,
)  # fmt: skip
_SCORED = SamplingParams(seed=0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)


def warm_up_plans(*, num_tokens: int, block_size: int) -> Iterator[StepPlan]:
    """A prompt of `num_tokens` - 1 tokens in slot 0 and blocks 0, 1, …, then a decode."""
    prompt = max(1, num_tokens - 1)
    yield _prefill(prompt, _GREEDY, block_size)
    if num_tokens > prompt:
        yield _decode(prompt, _GREEDY, block_size)


def kernel_plans(
    *, chunk_lengths: Iterable[int], max_tokens: int, max_model_len: int, num_blocks: int, block_size: int
) -> Iterator[StepPlan]:
    """A prefill of each of `chunk_lengths` with a decode after it, a decode whose keys are split, every kind of
    sampling, and a block copy.

    `chunk_lengths`: those for which the attention kernel's launch differs. `max_tokens`: of a sequence; longer chunks
    are left out.
    """
    for length in (1, *chunk_lengths):
        if length < max_tokens:
            yield _prefill(length, _GREEDY, block_size)
            yield _decode(length, _GREEDY, block_size)
    # Its blocks need not be its own, because the result is discarded.
    yield StepPlan(scheduled=[ScheduledSequence(0, min(max_model_len, _SPLIT_TOKENS) - 1, 1, needs_sample=False)])
    for sampling in _SAMPLINGS if max_tokens > 2 else ():
        yield _prefill(2, sampling, block_size)
        yield _decode(2, sampling, block_size)
        yield _decode(2, sampling, block_size, needs_sample=False)
    if num_blocks > 1:
        yield StepPlan(cow_copies=[(0, 1)], scheduled=[ScheduledSequence(0, 0, 1, needs_sample=False)])


def largest_plans(
    *, max_num_seqs: int, max_batch_tokens: int, max_model_len: int, adapter: int = 0
) -> Iterator[StepPlan]:  # fmt: skip
    """The steps that take the most memory.

    First as many rows as a step can have, which share `max_batch_tokens` and use all of the sampler; one of them ends
    at `max_model_len`. Then a prompt of `max_batch_tokens` whose tokens are all scored. Block tables stay as they are:
    what the pool contains does not matter. `adapter`: a LoRA adapter, as in NewSequence, that all rows have.
    """
    num_rows = min(max_num_seqs, max_batch_tokens)
    length = min(max_batch_tokens // num_rows, max_model_len)
    lengths = [min(max_batch_tokens - (num_rows - 1) * length, max_model_len), *[length] * (num_rows - 1)]
    starts = [0] * (num_rows - 1) + [max_model_len - lengths[-1]]
    yield StepPlan(
        new_sequences=[
            NewSequence(slot, 0, n, [0] * n, _COSTLIEST, (), adapter=adapter) for slot, n in enumerate(lengths)
        ],
        scheduled=[
            ScheduledSequence(slot, start, n, needs_sample=True)
            for slot, (start, n) in enumerate(zip(starts, lengths, strict=True))
        ],
    )
    prompt = min(max_batch_tokens, max_model_len)
    yield StepPlan(
        new_sequences=[NewSequence(0, 0, prompt, [0] * prompt, _SCORED, (), adapter=adapter)],
        scheduled=[ScheduledSequence(0, 0, prompt, needs_sample=True)],
    )


def copy_warm_up_plans(num_blocks: int) -> Iterator[StepPlan]:
    """Copy a few blocks to the host tier and back, twice: the first time of each direction includes setup."""
    pairs = [(index, index) for index in range(min(num_blocks, _NUM_COPIED_BLOCKS))]
    for _ in range(2 if pairs else 0):
        yield StepPlan(demotes=pairs)
        yield StepPlan(restores=pairs)


def _prefill(prompt: int, sampling: SamplingParams, block_size: int) -> StepPlan:
    """A prompt of `prompt` tokens in slot 0."""
    return _step(prompt, prompt, ScheduledSequence(0, 0, prompt, needs_sample=True), sampling, block_size)


def _decode(prompt: int, sampling: SamplingParams, block_size: int, *, needs_sample: bool = True) -> StepPlan:
    """The token after the prompt. The token is given, so that no step depends on the token of another."""
    return _step(prompt, prompt + 1, ScheduledSequence(0, prompt, 1, needs_sample), sampling, block_size)


def _step(prompt: int, num_tokens: int, row: ScheduledSequence, sampling: SamplingParams, block_size: int) -> StepPlan:
    new = NewSequence(0, 0, prompt, [0] * num_tokens, sampling, ())
    writes = [TableWrite(0, index, index) for index in range(-(-num_tokens // block_size))]
    return StepPlan(new_sequences=[new], table_writes=writes, scheduled=[row])
