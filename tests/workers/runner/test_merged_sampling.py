"""Ranks that draw from their own part of the vocabulary, and merge: the tokens of gathered logits, for fewer bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.sampling_form import SamplingForm
from coatcheck.workers.core.step_plan import NewSequence
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.lm_head import LmHead
from coatcheck.workers.model.parallel_layers import ParallelLmHead
from coatcheck.workers.runner.sampler import Sampler
from tests.workers.ranks import run_ranks

SLOTS = 24
PARAMS: list[dict[str, Any]] = [
    dict(temperature=0.0), dict(temperature=0.8), dict(temperature=1.2, top_k=20), dict(top_k=64, min_p=0.05),
    dict(temperature=0.0, top_p=0.5, top_k=3), dict(min_p=0.2), dict(top_k=20, top_p=0.8),
    dict(temperature=1.5, top_k=64, top_p=0.95, min_p=0.01),
]  # fmt: skip


def merge(communicator: Communicator, vocab: int) -> dict[str, list[list[int]]]:
    """By form: the tokens of gathered logits, and those that this rank merged."""
    torch.manual_seed(vocab)
    logits = torch.randn(SLOTS, vocab) * 3
    logits[::2] = logits[::2].round()  # ties, also between ranks
    part = -(-vocab // communicator.size)
    own = logits[:, communicator.rank * part :][:, :part]
    found = {}
    slots = torch.arange(SLOTS)
    for form in (SamplingForm.MERGED, SamplingForm.MERGED_FILTERED):
        tables = [torch.zeros(SLOTS + 1, 40, dtype=torch.int32) for _ in range(2)]
        whole = Sampler(SLOTS, tables[0])
        sampler = Sampler(SLOTS, tables[1], merge_over=communicator, vocab_size=vocab)
        for slot in range(SLOTS):
            params = PARAMS[slot % (len(PARAMS) if form is SamplingForm.MERGED_FILTERED else 2)]
            for each in (whole, sampler):
                each.set_parameters(
                    NewSequence(slot, slot % 3, 4, [1] * 4, SamplingParams(seed=slot * 7 + 1, **params), ())
                )
        features = sampler.features(range(SLOTS))
        assert sampler.choose_form(features) is form and not whole.choose_form(features).is_merged
        want = whole.sample(SamplingForm.DRAWN, logits.clone(), slots, slots + 5)
        have = sampler.sample(form, own.contiguous(), slots, slots + 5)
        assert torch.equal(*tables), "the tokens are in the state"
        found[form.name] = [want.tolist(), have.tolist()]
    return found


@pytest.mark.parametrize(("ranks", "vocab", "share_memory"), [(2, 1001, True), (2, 90, False), (4, 5003, False)])
def test_merged_tokens_are_those_of_gathered_logits(ranks: int, vocab: int, share_memory: bool) -> None:
    """Over shared memory and over gloo every rank gets the tokens that one rank samples from all logits: greedy rows,
    draws, top-k and min-p, with ties, a last rank with fewer tokens, and parts smaller than the largest top-k."""
    everyone = run_ranks(ranks, merge, vocab, share_memory=share_memory)
    assert all(found == everyone[0] for found in everyone)
    for want, have in everyone[0].values():
        assert have == want and len(set(have)) > 2


class _Alone(Communicator):
    """Rank 0 of two. The other rank's logits are zeros."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat((x, torch.zeros_like(x)), dim=dim)


class _Causal(nn.Module):
    """A causal model with a head alone, which changes its logits as `change` says."""

    base_model_prefix = "model"

    def __init__(self, change: Any, *, is_parallel: bool) -> None:
        super().__init__()
        linear = nn.Linear(8, 5)
        self.model = nn.Identity()
        self.lm_head = ParallelLmHead(linear, 9, _Alone()) if is_parallel else linear
        self.change = change
        self.config = SimpleNamespace(hidden_size=8, vocab_size=9 if is_parallel else 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, inputs_embeds: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.change(self.lm_head(inputs_embeds)))


def _fail_for_parts(logits: Tensor) -> Tensor:
    return (logits * 2.0).view(-1, 3, 3).flatten(1)[None]


def _forbid_a_token(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([1]), -1.0) if logits.shape[-1] == 9 else logits


@pytest.mark.parametrize(
    ("change", "is_parallel", "expected"),
    [
        (lambda logits: logits.tanh() * 30.0 / 7.0, True, True),
        (lambda logits: logits.log_softmax(-1), True, False),
        (_forbid_a_token, True, False),
        (_fail_for_parts, True, False),
        (lambda logits: logits, False, False),  # every rank has the whole head
    ],
)
def test_a_head_is_sharded_only_if_it_takes_each_logit_alone(change: Any, is_parallel: bool, expected: bool) -> None:
    """Soft-caps and scales leave a rank's logits as they are in the whole row. A head that looks at other logits, at a
    token's id or at the size of the vocabulary gathers them in every step."""
    torch.manual_seed(0)
    head = LmHead(_Causal(change, is_parallel=is_parallel))  # type: ignore[arg-type]
    assert head.can_shard(_Alone(), torch.float32, torch.device("cpu")) is expected
