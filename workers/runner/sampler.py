"""Sampler: logits to tokens, with the sampling parameters of each slot.

The parameters are on the device, one column per slot, written when a sequence takes the slot. Every rank samples from
the same gathered logits with the same seeds, and so gets the same tokens. In the merged forms (sampling_form.py) a rank
draws from the logits of its own tokens, and the ranks exchange the token that each drew with the value that won: 8
bytes a row. For top-k, with or without top-p, and for min-p they exchange their largest logits first.

A step first changes the logits by what only the host knows (`edit_logits`), then samples (`sample`). The second part
takes nothing but tensors, so CUDA graphs can hold it (cuda_graphs.py).
"""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.sampling.draw_part import draw_part, find_floors
from coatcheck.kernels.sampling.greedy import argmax, pick_tokens
from coatcheck.kernels.sampling.penalties import add_logit_bias, apply_penalties
from coatcheck.kernels.sampling.sample import sample
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.sampling_form import (
    MAX_MERGED_TOP_K,
    SamplingFeature,
    SamplingForm,
    choose_form,
    features_of,
    union,
)
from coatcheck.workers.core.step_plan import NewSequence
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.host_transfer import upload
from coatcheck.workers.runner.token_constraints import TokenConstraints

_log = logging.getLogger(__name__)


class Sampler:
    """The sampling parameters of `num_slots` slots, and of one more slot, `padding_slot`, which is greedy.

    `token_ids`: the runner's, int32 [num_slots + 1, max_len]. The first n tokens of a slot's row are its sequence, if
    the next token is at position n. `merge_over`: the ranks over which the vocabulary is divided, if their model can
    compute a rank's logits alone; None for logits of all tokens. `vocab_size`: of all ranks together.
    """

    def __init__(
        self, num_slots: int, token_ids: Tensor, *, merge_over: Communicator | None = None, vocab_size: int = 0
    ) -> None:
        self.padding_slot = num_slots
        self.forms = [form for form in SamplingForm if merge_over is not None or not form.is_merged]
        self._merge_over = merge_over
        self._part = 0 if merge_over is None else -(-vocab_size // merge_over.size)  # tokens of a rank
        self._reasons: set[str] = set()
        self._token_ids = token_ids
        self._device = device = token_ids.device
        # One row per parameter, in the order of `set_parameters`: a new sequence is one upload of a column.
        self._floats = torch.zeros(6, num_slots + 1, dtype=torch.float32, device=device)
        self._ints = torch.zeros(3, num_slots + 1, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._features: dict[int, SamplingFeature] = {}  # by slot
        self._step_slots: list[int] = []  # of the last step
        self._step_features = SamplingFeature.NONE
        self._constraints = TokenConstraints(device)

    def set_parameters(self, new: NewSequence) -> None:
        """Set the slot's parameters to those of a new sequence."""
        params, slot = new.sampling, new.slot
        self._sequences[slot] = new
        self._features[slot] = features_of(params, has_grammar=new.grammar_id is not None)
        self._step_slots, self._step_features = [], SamplingFeature.NONE
        self._constraints.set_sequence(new)
        floats = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self._floats[:, slot] = upload(floats, torch.float32, self._device)
        self._ints[:, slot] = upload((params.top_k, new.choice, new.prompt_len), torch.int32, self._device)
        seed = params.seed or 0
        self._seeds[slot] = upload(seed - (1 << 64) if seed >= 1 << 63 else seed, torch.int64, self._device)

    def features(self, slots: Sequence[int]) -> SamplingFeature:
        """Everything that some of the slots' sequences ask for."""
        if slots != self._step_slots:  # a decode mostly has the slots of the step before
            self._step_slots, self._step_features = list(slots), union(self._features[slot] for slot in slots)
        return self._step_features

    def choose_form(self, features: SamplingFeature) -> SamplingForm:
        """The form for a step with these features. The first step that gathers logits for a reason logs the reason."""
        form, reason = choose_form(features, can_merge=self._merge_over is not None)
        if self._merge_over is not None and not form.is_merged and reason not in self._reasons:
            self._reasons.add(reason)
            _log.debug("a step gathers the logits of the whole vocabulary: %s", reason)
        return form

    def edit_logits(self, logits: Tensor, slots: list[int], positions: list[int], features: SamplingFeature) -> None:
        """Add biases, and forbid or force tokens, in place. Penalties, which come later, leave forbidden tokens
        forbidden.

        logits:   float32 [R, vocab]; row r is of slots[r], for the token at positions[r]
        features: those of the slots
        """
        if SamplingFeature.BIAS in features:
            self._add_bias(logits, [self._sequences[slot] for slot in slots], positions)
        if SamplingFeature.CONSTRAINTS in features:
            self._constraints.apply(logits, slots, positions, self._token_ids)

    def sample(self, form: SamplingForm, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Sample one token per row, and write the tokens into `token_ids`. Returns int64 [R].

        logits:           float32 [R, vocab], changed in place; row r is of slots[r], for the token at positions[r];
                          in a merged form [R, tokens of this rank]
        slots, positions: int64 [R]
        """
        if form.is_merged:
            tokens = self._draw_and_merge(form, logits, slots, positions)
        elif form is SamplingForm.GREEDY:
            tokens = argmax(logits)
        else:
            floats, ints = self._floats[:, slots], self._ints[:, slots]
            if form is SamplingForm.PENALISED:
                apply_penalties(
                    logits, self._token_ids, slots, ints[2], positions.to(torch.int32), floats[3], floats[4], floats[5]
                )
            tokens = sample(
                logits,
                temperature=floats[0],
                top_k=ints[0],
                top_p=floats[1],
                min_p=floats[2],
                seed=self._seeds[slots],
                choice=ints[1],
                position=positions,
            )
        self._token_ids[slots, positions] = tokens.to(torch.int32)
        return tokens

    def sample_rows(self, form: SamplingForm, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """As `sample`, for slots and positions that the host has as lists."""
        if form is SamplingForm.GREEDY and self._device.type == "cpu":
            return pick_tokens(logits, slots, positions, self._token_ids)
        return self.sample(form, logits, *upload([slots, positions], torch.int64, self._device))

    def _draw_and_merge(self, form: SamplingForm, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The tokens that `sample` draws from the logits of all ranks, int64 [R]."""
        ranks = self._merge_over
        assert ranks is not None
        floats, ints = self._floats[:, slots], self._ints[:, slots]
        if form is SamplingForm.MERGED_FILTERED:
            # The k largest of each rank contain the k largest of all.
            largest = logits.topk(min(MAX_MERGED_TOP_K, logits.shape[1])).values
            missing = min(MAX_MERGED_TOP_K, self._part) - largest.shape[1]  # of the last rank
            largest = torch.nn.functional.pad(largest, (0, missing), value=-math.inf)
            floors = find_floors(ranks.all_gather(largest), floats[0], ints[0], floats[1], floats[2])
        else:
            floors = torch.full_like(floats[0], -math.inf)
        best, tokens = draw_part(
            logits,
            ranks.rank * self._part,
            temperature=floats[0],
            floors=floors,
            seed=self._seeds[slots],
            choice=ints[1],
            position=positions,
        )
        drawn = ranks.all_gather(torch.stack((best.view(torch.int32), tokens.to(torch.int32)), dim=1))
        # Of equal values the first rank's is taken, whose tokens have the smallest ids.
        winner = drawn.view(torch.float32)[:, 0::2].argmax(dim=1, keepdim=True)
        return drawn[:, 1::2].gather(1, winner)[:, 0].long()

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
