"""Sampler: logits to tokens, with the sampling parameters of each slot.

The parameters are on the device, one column per slot, written when a sequence takes the slot. Every rank samples from
the same gathered logits with the same seeds, and so gets the same tokens.
"""

import math

import torch
from torch import Tensor

from coatcheck.kernels.sampling.penalties import add_logit_bias, apply_penalties
from coatcheck.kernels.sampling.sample import sample
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.step_plan import NewSequence
from coatcheck.workers.runner.host_transfer import upload
from coatcheck.workers.runner.token_constraints import TokenConstraints


class Sampler:
    """The sampling parameters of `num_slots` slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        # One row per parameter, in the order of `set_parameters`: a new sequence is one upload of a column.
        self._floats = torch.zeros(6, num_slots, dtype=torch.float32, device=device)
        self._ints = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._constraints = TokenConstraints(device)

    def set_parameters(self, new: NewSequence) -> None:
        """Set the slot's parameters to those of a new sequence."""
        params, slot = new.sampling, new.slot
        self._sequences[slot] = new
        self._constraints.set_sequence(new)
        floats = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self._floats[:, slot] = upload(floats, torch.float32, self._device)
        self._ints[:, slot] = upload((params.top_k, new.choice), torch.int32, self._device)
        seed = params.seed or 0
        self._seeds[slot] = upload(seed - (1 << 64) if seed >= 1 << 63 else seed, torch.int64, self._device)

    def sample_tokens(self, logits: Tensor, slots: list[int], positions: list[int], token_ids: Tensor) -> Tensor:
        """Sample one token per row: int64 [R].

        logits:    float32 [R, vocab], changed in place; row r is of slots[r], for the token at positions[r]
        token_ids: int32 [num_slots, max_len]; the first positions[r] tokens of row slots[r] are the sequence so far
        """
        sequences = [self._sequences[slot] for slot in slots]
        self._add_bias(logits, sequences, positions)
        slot_ids, position_ids = (upload(ids, torch.int64, self._device) for ids in (slots, positions))
        if any(_has_penalties(sequence) for sequence in sequences):
            self._apply_penalties(logits, sequences, slot_ids, position_ids, token_ids[:, : max(positions)])
        self._constraints.apply(logits, slots, positions, token_ids)
        if all(sequence.sampling.temperature == 0.0 for sequence in sequences):
            return logits.argmax(dim=-1)
        floats, ints = self._floats[:, slot_ids], self._ints[:, slot_ids]
        return sample(
            logits,
            temperature=floats[0],
            top_k=ints[0],
            top_p=floats[1],
            min_p=floats[2],
            seed=self._seeds[slot_ids],
            choice=ints[1],
            position=position_ids,
        )

    def _add_bias(self, logits: Tensor, sequences: list[NewSequence], positions: list[int]) -> None:
        """Add logit_bias, and forbid end and stop tokens before min_tokens."""
        triples: list[tuple[int, int, float]] = []
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            triples.extend((row, token, bias) for token, bias in sequence.sampling.logit_bias.items())
            if position - sequence.prompt_len < sequence.sampling.min_tokens:
                triples.extend((row, token, -math.inf) for token in sequence.stop_token_ids)
        if triples:
            rows, ids, bias = zip(*triples, strict=True)
            columns = (upload(rows, torch.int64, self._device), upload(ids, torch.int64, self._device))
            add_logit_bias(logits, *columns, upload(bias, torch.float32, self._device))

    def _apply_penalties(
        self,
        logits: Tensor,
        sequences: list[NewSequence],
        slot_ids: Tensor,
        position_ids: Tensor,
        token_ids: Tensor,
    ) -> None:
        floats = self._floats[:, slot_ids]
        prompt_lens = upload([sequence.prompt_len for sequence in sequences], torch.int32, self._device)
        history, lens = token_ids[slot_ids], position_ids.to(torch.int32)
        apply_penalties(logits, history, prompt_lens, lens, floats[3], floats[4], floats[5])

    def prompt_logprobs(self, slot: int) -> int | None:
        """`prompt_logprobs` of the slot's request, for its first choice. None for others, whose prompt is the same."""
        return self.sampling(slot).prompt_logprobs if self._sequences[slot].choice == 0 else None

    def scores_prompt(self, slot: int, start: int) -> bool:
        """Whether a row from position `start` on reports logprobs of prompt tokens."""
        return self.prompt_logprobs(slot) is not None and start < self.prompt_len(slot) - 1

    def sampling(self, slot: int) -> SamplingParams:
        return self._sequences[slot].sampling

    def prompt_len(self, slot: int) -> int:
        return self._sequences[slot].prompt_len


def _has_penalties(sequence: NewSequence) -> bool:
    params = sequence.sampling
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
