"""ModelRules: what of a model is refused by its config.json and the settings alone.

Ranks apply these rules to transformers' config objects, `coatcheck serve` to config.json before anything starts. Pure.
"""

from collections.abc import Mapping
from typing import Any

from ..proto.errors import InvalidConfig, InvalidModel


def check_kind(name: str, model_type: str, *, is_quantised: bool, takes_more: bool, is_encoder_decoder: bool) -> None:
    """Raises InvalidModel for a kind of model that is not served. `takes_more`: it takes more than text."""
    if is_quantised:
        raise InvalidModel(f"{name} is quantised; only float32, bfloat16 and float16 checkpoints are served")
    if takes_more:
        raise InvalidModel(f"{model_type} takes more than text; serve its text-only checkpoint")
    if is_encoder_decoder:
        raise InvalidModel(f"{model_type} is an encoder-decoder; only decoder-only models are served")


def choose_length(asked: int | None, made_for: int, scaling: Mapping[str, Any]) -> int:
    """The max_model_len: as asked, or what the model was made for.

    `scaling`: config.json's flat rope_parameters, empty where there are none or one set for each kind of layer. Yarn
    stretches what the model was made for by its factor; dynamic NTK may be asked for up to its factor more. Raises
    InvalidConfig for a longer one: positions that the model never saw give nonsense.
    """
    longest = made_for
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    if kind == "yarn" and factor:
        stretched = int(factor * scaling.get("original_max_position_embeddings", made_for))
        made_for = longest = max(made_for, stretched)
    elif kind == "dynamic":
        longest = int(made_for * (factor or 1.0))
    if asked is not None and asked > longest:
        raise InvalidConfig(f"max-model-len is {asked}, but the model goes to {longest}; use at most that")
    return asked or made_for


def no_deterministic_experts(what: str) -> InvalidConfig:
    """The refusal of --deterministic for a mixture of experts; `what` names the experts."""
    return InvalidConfig(
        f"deterministic: {what} multiplies the tokens of one expert together, so that a result depends on who shares "
        "the step; serve a mixture of experts without --deterministic"
    )


def check_deterministic_heads(head_dim: int) -> None:
    """Raises InvalidConfig for heads that --deterministic cannot have on a CPU."""
    if head_dim % 16 or head_dim > 256:
        raise InvalidConfig(
            f"deterministic on CPU takes heads of a multiple of 16, at most 256 (here: {head_dim}); "
            "leave --deterministic out"
        )
