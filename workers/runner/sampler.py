"""Sampler: turns logits into tokens for the slots that sample, as each slot's request asked.

Keeps one row of parameters per slot on the rank's device, set when a sequence takes the slot. Every rank runs it on
the same gathered logits and so draws the same tokens. It does not know prompts beyond the token mirror it is given,
nor when a sequence ends.
"""

import math

import torch
from torch import Tensor

from coatcheck.kernels.sampling.logit_bias import add_logit_bias
from coatcheck.kernels.sampling.penalties import apply_penalties
from coatcheck.kernels.sampling.sample import sample
from coatcheck.workers.core.step_plan import NewRow
from coatcheck.workers.runner.host_transfer import upload


class Sampler:
    """Parameters of `num_slots` slots, and the draw."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        # One row per parameter, so that a new sequence is one column written; `set` has the order.
        self._floats = torch.zeros(6, num_slots, dtype=torch.float32, device=device)
        self._ints = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._new: dict[int, NewRow] = {}

    def set(self, new: NewRow) -> None:
        """A sequence takes its slot."""
        params, slot = new.sampling, new.slot
        self._new[slot] = new
        floats = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self._floats[:, slot] = upload(floats, torch.float32, self._device)
        self._ints[:, slot] = upload((params.top_k, new.choice), torch.int32, self._device)
        seed = params.seed or 0
        self._seeds[slot] = upload(seed - (1 << 64) if seed >= 1 << 63 else seed, torch.int64, self._device)

    def draw(self, logits: Tensor, slots: list[int], positions: list[int], tokens: Tensor) -> Tensor:
        """One token per row: int64 [R].

        logits: float32 [R, V], changed in place; row r belongs to slots[r] and its token goes to positions[r];
        tokens: int32 [num_slots, max_len], the mirror, of which positions[r] tokens count.
        """
        news = [self._new[slot] for slot in slots]
        self._bias(logits, news, positions)
        rows, where = upload(slots, torch.int64, self._device), upload(positions, torch.int64, self._device)
        if any(_penalised(new) for new in news):
            self._penalise(logits, news, rows, where, tokens[:, : max(positions)])
        if all(new.sampling.temperature == 0.0 for new in news):
            return logits.argmax(dim=-1)
        floats, ints = self._floats[:, rows], self._ints[:, rows]
        return sample(
            logits,
            temperature=floats[0],
            top_k=ints[0],
            top_p=floats[1],
            min_p=floats[2],
            seed=self._seeds[rows],
            choice=ints[1],
            position=where,
        )

    def wants_logprobs(self, slot: int) -> int | None:
        """How many most likely tokens to report beside each chosen one; None: no logprobs at all."""
        return self._new[slot].sampling.logprobs

    def wants_prompt_logprobs(self, slot: int) -> int | None:
        """The same for the tokens of the prompt."""
        return self._new[slot].sampling.prompt_logprobs

    def scores_prompt(self, slot: int, start: int) -> bool:
        """Whether a row from position `start` on reports logprobs of prompt tokens."""
        return self.wants_prompt_logprobs(slot) is not None and start < self.prompt_len(slot) - 1

    def prompt_len(self, slot: int) -> int:
        """Tokens of the slot's prompt."""
        return self._new[slot].prompt_len

    def _bias(self, logits: Tensor, news: list[NewRow], positions: list[int]) -> None:
        triples: list[tuple[int, int, float]] = []
        for row, (new, position) in enumerate(zip(news, positions, strict=True)):
            triples.extend((row, token, bias) for token, bias in new.sampling.logit_bias.items())
            if position - new.prompt_len < new.sampling.min_tokens:
                triples.extend((row, token, -math.inf) for token in new.stop_token_ids)
        if triples:
            rows, ids, bias = zip(*triples, strict=True)
            columns = (upload(rows, torch.int64, self._device), upload(ids, torch.int64, self._device))
            add_logit_bias(logits, *columns, upload(bias, torch.float32, self._device))

    def _penalise(self, logits: Tensor, news: list[NewRow], rows: Tensor, where: Tensor, tokens: Tensor) -> None:
        floats = self._floats[:, rows]
        prompt_lens = upload([new.prompt_len for new in news], torch.int32, self._device)
        history = tokens[rows]
        apply_penalties(logits, history, prompt_lens, where.to(torch.int32), floats[3], floats[4], floats[5])


def _penalised(new: NewRow) -> bool:
    params = new.sampling
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
