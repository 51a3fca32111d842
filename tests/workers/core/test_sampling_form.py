"""Which form of the sampler computes a step: the cheapest one that does all that its rows ask for."""

from __future__ import annotations

from typing import Any

import pytest

from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.workers.core.sampling_form import SamplingFeature, SamplingForm, choose_form, features_of, union

GREEDY: dict[str, Any] = dict(temperature=0.0)


@pytest.mark.parametrize(
    ("params", "features"),
    [
        (GREEDY, SamplingFeature.NONE),
        (GREEDY | dict(top_k=5, top_p=0.5, min_p=0.1), SamplingFeature.NONE),  # a greedy row has no filters
        (dict(top_k=5), SamplingFeature.DRAW),
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
    assert features_of(SamplingParams(**params)) == features


def test_a_step_takes_the_cheapest_form_for_all_its_rows() -> None:
    """One drawn row makes a step drawn, one row with penalties makes a step penalised; what only the host knows does
    not change the form."""
    everything = [*SamplingFeature]
    beside = [each for each in everything if each not in (SamplingFeature.DRAW, SamplingFeature.PENALTIES)]
    assert choose_form(union([])) is SamplingForm.GREEDY
    assert choose_form(union(beside)) is SamplingForm.GREEDY
    assert choose_form(union([*beside, SamplingFeature.DRAW])) is SamplingForm.DRAWN
    assert choose_form(union(everything)) is SamplingForm.PENALISED
