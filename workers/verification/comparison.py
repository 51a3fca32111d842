"""find_difference(): finds where a served checkpoint's logits differ from those of transformers, both in float32.

The same sequences are computed as a server computes them: whole, in chunks, in a batch with another sequence, and on a
cached prefix. In each case a token's logits must equal those of one pass of transformers over the whole sequence.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coatcheck.workers.attention.state_layers import correct_dt_limits
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver

# Relative to the largest logit. Rounding stays below 1e-4; a wrong computation is off by 1e-2 or more.
TOLERANCE: Final = 1e-3
# How many tokens of each of two sequences a step computes: chunks beside chunks, chunks beside decodes, decodes alone.
NEIGHBOUR_STEPS: Final = ((20, 0), (23, 9), (1, 17), (1, 11), (1, 1), (1, 1), (1, 1), (2, 1), (0, 1), (0, 1))
_CHUNKS: Final = (20, 23, *(1,) * 7)
_LENGTHS: Final = tuple(map(sum, zip(*NEIGHBOUR_STEPS, strict=True)))  # longer than a sliding window
_SUFFIX: Final = 21  # tokens at the end of the third sequence that the first does not have

Logits = Mapping[int, Tensor]  # by position in the sequence, float32 [vocab_size] each


class NoReference(Exception):
    """transformers cannot run the model, or its logits are not finite; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`case`: how the sequence was computed, a key of CASES. `amount`: the largest difference relative to the largest
    logit; infinity for NaN."""

    case: str
    position: int
    amount: float

    def __str__(self) -> str:
        return (
            f"the logits of token {self.position}, computed {self.case}, differ from transformers' by "
            f"{self.amount:.1e} of the largest"
        )


def find_difference(
    checkpoint: Path, *, progress: Callable[[str], None] = lambda case: None, seed: int = 0
) -> Difference | None:
    """The first difference in the four CASES, or None. `progress`: called with a description of each case that begins.

    Raises InvalidModel for a checkpoint that is not served, NoReference if there is nothing to compare with.
    """
    model = load_model(checkpoint, communicator=Communicator(), dtype="float32", device="cpu")
    sequences = make_sequences(model.spec.vocab_size, seed)
    progress("computing with transformers")
    expected = reference_logits(checkpoint, sequences)
    for case, run in CASES.items():
        progress(f"computing {case}")
        for logits, wanted in zip(run(model, sequences), expected, strict=True):
            if (difference := compare_logits(case, logits, wanted)) is not None:
                return difference
    return None


def make_sequences(vocab_size: int, seed: int) -> list[list[int]]:
    """Three sequences of random tokens; the third begins as the first does."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        tokens: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        return tokens

    first, second = (draw(length) for length in _LENGTHS)
    return [first, second, first[: len(first) - _SUFFIX // 2] + draw(_SUFFIX)]


def reference_logits(checkpoint: Path, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """transformers' logits of each sequence alone, float32 [tokens, vocab_size]. Limits of dt are corrected (see
    correct_dt_limits). Raises NoReference."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        correct_dt_limits(model)
        model.eval()
        with torch.inference_mode():
            logits = [model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float() for tokens in sequences]
    except Exception as error:  # the model's code may raise anything
        raise NoReference(" ".join(str(error).split())[:300] or type(error).__name__) from error
    if not all(rows.isfinite().all() for rows in logits):
        raise NoReference("its logits are not finite")
    return logits


def compare_logits(case: str, logits: Logits, wanted: Tensor) -> Difference | None:
    """The difference at the first position whose logits differ from `wanted`, float32 [tokens, vocab_size], or None."""
    for position, row in sorted(logits.items()):
        amount = ((row - wanted[position]).abs().max() / wanted.abs().max()).item()
        if not amount < TOLERANCE:
            return Difference(case, position, math.inf if math.isnan(amount) else amount)
    return None


def run_whole(model: Model, sequences: Sequence[Sequence[int]]) -> list[Logits]:
    """Each sequence alone, in one step."""

    def run(tokens: Sequence[int]) -> Logits:
        driver = PagedDriver(model)
        rows = model.logits(driver.hidden(driver.add_sequence(tokens, 0), len(tokens)))
        return dict(enumerate(rows))

    return [run(tokens) for tokens in sequences]


def run_in_chunks(model: Model, sequences: Sequence[Sequence[int]]) -> list[Logits]:
    """Each sequence alone, in chunks and then token by token."""
    runs: list[Logits] = []
    for tokens in sequences:
        driver = PagedDriver(model)
        running = driver.add_sequence(tokens, 0)
        rows: dict[int, Tensor] = {}
        for count in _CHUNKS:
            n = min(count, len(tokens) - running.computed)
            if n > 0:
                (row,) = driver.step([(running, n)])
                rows[running.computed - 1] = row
        runs.append(rows)
    return runs


def run_beside_neighbour(model: Model, sequences: Sequence[Sequence[int]]) -> Sequence[Logits]:
    """The first two sequences in the same steps. The third is not computed, and has no logits in the result."""
    driver = PagedDriver(model)
    running = [driver.add_sequence(tokens, 0) for tokens in sequences[:2]]
    rows: list[dict[int, Tensor]] = [{} for _ in sequences]
    for counts in NEIGHBOUR_STEPS:
        work = [(index, n) for index, n in enumerate(counts) if n]
        logits = driver.step([(running[index], n) for index, n in work])
        for (index, _), row in zip(work, logits, strict=True):
            rows[index][running[index].computed - 1] = row
    return rows


def run_on_cached_prefix(model: Model, sequences: Sequence[Sequence[int]]) -> list[Logits]:
    """The third sequence on the cached blocks of the first, in a step with a decode of the first. A model that keeps
    states computes the third sequence whole."""
    driver = PagedDriver(model)
    first = driver.add_sequence(sequences[0], 0)
    driver.step([(first, len(first.tokens) - 1)])
    third = driver.add_sequence(sequences[2], 0, prefix_of=first)
    assert third.computed > 0 or model.spec.state_layers, "the sequences must share a full block"
    rows = driver.step([(first, 1), (third, len(third.tokens) - third.computed)])
    return [{len(first.tokens) - 1: rows[0]}, {}, {len(third.tokens) - 1: rows[1]}]


CASES: Final[Mapping[str, Callable[[Model, Sequence[Sequence[int]]], Sequence[Logits]]]] = {
    "in one step": run_whole,
    "in chunks": run_in_chunks,
    "beside another sequence": run_beside_neighbour,
    "on a cached prefix": run_on_cached_prefix,
}
