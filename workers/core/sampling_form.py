"""What the rows of a step ask of the sampler, and the form of the sampler that computes them. Pure.

A form is a fixed sequence of kernels, whose inputs are tensors of the rank's slots, so a CUDA graph can hold it. What
needs lists of the host changes the logits before, or reads them beside the sampler, and is launched in every step that
asks for it: grammar masks, logit biases and `min_tokens`, forbidden and forced tokens, log-probabilities.
"""

from collections.abc import Iterable
from enum import Enum, Flag, auto

from coatcheck.proto.sampling import SamplingParams


class SamplingFeature(Flag):
    """What a sequence asks of the sampler. A union of features is that of several sequences."""

    NONE = 0
    DRAW = auto()
    PENALTIES = auto()
    BIAS = auto()  # logit_bias, or min_tokens
    CONSTRAINTS = auto()  # allowed and bad tokens, reasoning limits
    LOGPROBS = auto()


class SamplingForm(Enum):
    """`GREEDY`: the largest logit of each row. `DRAWN`: filters and a draw, also for greedy rows beside drawn ones.
    `PENALISED`: penalties before that."""

    GREEDY = auto()
    DRAWN = auto()
    PENALISED = auto()


def features_of(params: SamplingParams) -> SamplingFeature:
    """What a request's parameters ask for."""
    has = {
        SamplingFeature.DRAW: params.temperature > 0.0,
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
    """Everything that some of `features` has."""
    everything = SamplingFeature.NONE
    for feature in set(features):
        everything |= feature
    return everything


def choose_form(features: SamplingFeature) -> SamplingForm:
    """The cheapest form that computes rows with these features."""
    if SamplingFeature.PENALTIES in features:
        return SamplingForm.PENALISED
    return SamplingForm.DRAWN if SamplingFeature.DRAW in features else SamplingForm.GREEDY
