"""The sampling features that the rows of a step use, and the form of the sampler that computes them. Pure.

If the vocabulary is divided over ranks, there are two ways to sample, which give the same tokens. Either every rank
gathers the logits of all tokens. Or, in the merged forms, each rank draws from its own tokens, and the ranks exchange
the drawn tokens.

A form is a fixed sequence of kernels. Their inputs are tensors with a row for each slot, so a CUDA graph can capture a
form. Other kernels read lists that the host makes for each step, and are launched outside the graph: grammar masks,
logit biases, `min_tokens`, and forbidden and forced tokens change the logits before the sampler, and log-probabilities
read them.
"""

from collections.abc import Iterable
from enum import Enum, Flag, auto
from functools import cache
from typing import Final, NamedTuple

from coatcheck.proto.sampling import SamplingParams

# The largest logits of a row that each rank sends for top-k or min-p. Models publish a top-k of 20 to 64.
MAX_MERGED_TOP_K: Final = 64


class SamplingFeature(Flag):
    """The sampling features that a sequence uses. Those of a step are the union over its sequences."""

    NONE = 0
    DRAW = auto()
    FEW_KEPT = auto()  # top_k up to MAX_MERGED_TOP_K, also with top_p; or min_p
    MANY_KEPT = auto()  # a larger top_k, or top_p without top_k
    GRAMMAR = auto()
    PENALTIES = auto()
    BIAS = auto()  # logit_bias, or min_tokens
    CONSTRAINTS = auto()  # allowed and bad tokens, reasoning limits
    LOGPROBS = auto()


class SamplingForm(Enum):
    """How a step samples.

    `GREEDY`: the largest logit of each row.
    `DRAWN`: filters and a draw. Greedy rows may be among the drawn ones.
    `PENALISED`: penalties, then as DRAWN.
    `MERGED`: each rank takes the largest logit of its own tokens, or draws among them without filters.
    `MERGED_FILTERED`: as MERGED, with top-k, top-p after top-k, and min-p.
    """

    GREEDY = auto()
    DRAWN = auto()
    PENALISED = auto()
    MERGED = auto()
    MERGED_FILTERED = auto()

    @property
    def is_merged(self) -> bool:
        """Whether the logits are those of a rank's part of the vocabulary."""
        return self in (SamplingForm.MERGED, SamplingForm.MERGED_FILTERED)


class SamplingChoice(NamedTuple):
    """`reason`: why the form is merged, or why it is not."""

    form: SamplingForm
    reason: str


_NEED_ALL_TOKENS: Final = {
    SamplingFeature.MANY_KEPT: f"top_p without top_k, or top_k above {MAX_MERGED_TOP_K}",
    SamplingFeature.GRAMMAR: "a grammar",
    SamplingFeature.PENALTIES: "penalties",
    SamplingFeature.BIAS: "logit_bias or min_tokens",
    SamplingFeature.CONSTRAINTS: "allowed or bad tokens, or a reasoning limit",
    SamplingFeature.LOGPROBS: "log-probabilities",
}


def features_of(params: SamplingParams, *, has_grammar: bool) -> SamplingFeature:
    """The features that a request's parameters use."""
    is_drawn, few = params.temperature > 0.0, 0 < params.top_k <= MAX_MERGED_TOP_K
    many = params.top_k > MAX_MERGED_TOP_K or (params.top_p < 1.0 and not few)
    has = {
        SamplingFeature.DRAW: is_drawn,
        SamplingFeature.FEW_KEPT: is_drawn and (few or params.min_p > 0.0),
        SamplingFeature.MANY_KEPT: is_drawn and many,
        SamplingFeature.GRAMMAR: has_grammar,
        SamplingFeature.PENALTIES: (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        ),
        SamplingFeature.BIAS: bool(params.logit_bias) or params.min_tokens > 0,
        SamplingFeature.CONSTRAINTS: (
            bool(params.allowed_token_ids or params.bad_token_ids) or params.reasoning_limit is not None
        ),
        SamplingFeature.LOGPROBS: params.logprobs is not None,
    }
    return union(feature for feature, is_asked in has.items() if is_asked)


def union(features: Iterable[SamplingFeature]) -> SamplingFeature:
    """The features that at least one of `features` has."""
    everything = SamplingFeature.NONE
    for feature in set(features):
        everything |= feature
    return everything


@cache
def choose_form(features: SamplingFeature, *, can_merge: bool) -> SamplingChoice:
    """The cheapest form that computes rows with these features.

    `can_merge`: the vocabulary is divided over ranks, and the model's head can compute a rank's logits alone.
    """
    obstacles = [what for feature, what in _NEED_ALL_TOKENS.items() if feature in features]
    if can_merge and not obstacles:
        form = SamplingForm.MERGED_FILTERED if SamplingFeature.FEW_KEPT in features else SamplingForm.MERGED
        return SamplingChoice(form, "each rank draws from its own part of the vocabulary")
    reason = f"a request has {obstacles[0]}" if can_merge else "the head gives every rank the logits of all tokens"
    if SamplingFeature.PENALTIES in features:
        return SamplingChoice(SamplingForm.PENALISED, reason)
    form = SamplingForm.DRAWN if SamplingFeature.DRAW in features else SamplingForm.GREEDY
    return SamplingChoice(form, reason)
