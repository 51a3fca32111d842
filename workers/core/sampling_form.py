"""What the rows of a step ask of the sampler, and the form of the sampler that computes them. Pure.

If the vocabulary is divided over ranks, a step gathers the logits of all tokens on every rank, or, in the merged forms,
each rank draws from its own tokens, and the ranks exchange what they drew. Both give the same tokens.

A form is a fixed sequence of kernels, whose inputs are tensors of the rank's slots, so a CUDA graph can hold a form.
Other kernels need lists of the host, and are launched in every step that asks for them. Grammar masks, logit biases,
`min_tokens`, and forbidden and forced tokens change the logits before the sampler. Log-probabilities read them.
"""

from collections.abc import Iterable
from enum import Enum, Flag, auto
from typing import Final, NamedTuple

from coatcheck.proto.sampling import SamplingParams

# The largest logits of a row that each rank sends for top-k or min-p. Models publish a top-k of 20 to 64.
MAX_MERGED_TOP_K: Final = 64


class SamplingFeature(Flag):
    """What a sequence asks of the sampler. The features of several sequences are the union of theirs."""

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
    """`GREEDY`: the largest logit of each row. `DRAWN`: filters and a draw, also for greedy rows beside drawn ones.
    `PENALISED`: penalties before that. `MERGED`: the largest logit, or a draw without filters, of a rank's tokens.
    `MERGED_FILTERED`: the same with top-k, top-p after top-k, and min-p."""

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
    """What a request asks for."""
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
