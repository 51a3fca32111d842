"""Which form of the sampler computes a step: the cheapest one that does all that its rows ask for."""

from __future__ import annotations

from typing import Any

import pytest

from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.workers.core.sampling_form import (
    MAX_MERGED_TOP_K,
    SamplingChoice,
    SamplingFeature,
    SamplingForm,
    choose_form,
    features_of,
    union,
)

GREEDY: dict[str, Any] = dict(temperature=0.0)


@pytest.mark.parametrize(
    ("params", "features"),
    [
        (GREEDY, SamplingFeature.NONE),
        (GREEDY | dict(top_k=5, top_p=0.5, min_p=0.1), SamplingFeature.NONE),  # a greedy row has no filters
        ({}, SamplingFeature.DRAW),
        (dict(top_k=MAX_MERGED_TOP_K), SamplingFeature.DRAW | SamplingFeature.FEW_KEPT),
        (dict(min_p=0.1), SamplingFeature.DRAW | SamplingFeature.FEW_KEPT),
        (dict(top_k=MAX_MERGED_TOP_K + 1), SamplingFeature.DRAW | SamplingFeature.MANY_KEPT),
        (dict(top_p=0.9), SamplingFeature.DRAW | SamplingFeature.MANY_KEPT),
        (dict(top_p=0.9, top_k=20), SamplingFeature.DRAW | SamplingFeature.FEW_KEPT),
        (dict(top_p=0.9, top_k=65), SamplingFeature.DRAW | SamplingFeature.MANY_KEPT),
        (dict(top_p=0.9, min_p=0.1), SamplingFeature.DRAW | SamplingFeature.FEW_KEPT | SamplingFeature.MANY_KEPT),
        (GREEDY | dict(repetition_penalty=1.1), SamplingFeature.PENALTIES),
        (GREEDY | dict(presence_penalty=-0.1), SamplingFeature.PENALTIES),
        (dict(frequency_penalty=0.1), SamplingFeature.DRAW | SamplingFeature.PENALTIES),
        (GREEDY | dict(logit_bias={3: 1.0}), SamplingFeature.BIAS),
        (GREEDY | dict(min_tokens=2), SamplingFeature.BIAS),
        (GREEDY | dict(allowed_token_ids=(3,)), SamplingFeature.CONSTRAINTS),
        (GREEDY | dict(bad_token_ids=((3, 4),)), SamplingFeature.CONSTRAINTS),
        (GREEDY | dict(reasoning_limit=ReasoningLimit(5, (1,), (2,))), SamplingFeature.CONSTRAINTS),
        (GREEDY | dict(logprobs=0), SamplingFeature.LOGPROBS),
    ],
)
def test_features_of_a_request(params: dict[str, Any], features: SamplingFeature) -> None:
    """Every parameter that changes the sampler's work is a feature, and no other is."""
    assert features_of(SamplingParams(**params), has_grammar=False) == features
    with_grammar = features_of(SamplingParams(**params), has_grammar=True)
    assert with_grammar == features | SamplingFeature.GRAMMAR


def test_a_step_takes_the_cheapest_form_for_all_its_rows() -> None:
    """One drawn row makes a step drawn, one row with penalties makes a step penalised; what only the host knows does
    not change the form."""
    everything = [*SamplingFeature]
    beside = [each for each in everything if each not in (SamplingFeature.DRAW, SamplingFeature.PENALTIES)]
    for features, form in (
        ([], SamplingForm.GREEDY),
        (beside, SamplingForm.GREEDY),
        ([*beside, SamplingFeature.DRAW], SamplingForm.DRAWN),
        (everything, SamplingForm.PENALISED),
    ):
        choice = SamplingChoice(form, "the head gives every rank the logits of all tokens")
        assert choose_form(union(features), can_merge=False) == choice


def test_ranks_merge_their_tokens_where_no_row_needs_all_logits() -> None:
    """Greedy rows, draws, top-k of few tokens and min-p are merged over ranks. One row that needs the logits of all
    tokens makes the step gather them, and the reason names what the row asks for."""
    draw, few = SamplingFeature.DRAW, SamplingFeature.FEW_KEPT
    own = "each rank draws from its own part of the vocabulary"
    for features, form in (
        (SamplingFeature.NONE, SamplingForm.MERGED),
        (draw, SamplingForm.MERGED),
        (draw | few, SamplingForm.MERGED_FILTERED),
    ):
        assert choose_form(features, can_merge=True) == (form, own)
    for feature, what in (
        (SamplingFeature.MANY_KEPT, "top_p without top_k, or top_k above 64"),
        (SamplingFeature.GRAMMAR, "a grammar"),
        (SamplingFeature.PENALTIES, "penalties"),
        (SamplingFeature.BIAS, "logit_bias or min_tokens"),
        (SamplingFeature.CONSTRAINTS, "allowed or bad tokens, or a reasoning limit"),
        (SamplingFeature.LOGPROBS, "log-probabilities"),
    ):
        choice = choose_form(draw | few | feature, can_merge=True)
        assert not choice.form.is_merged and choice.reason == f"a request has {what}"
