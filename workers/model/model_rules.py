"""ModelRules: the checks of a model that need only its config.json and the settings.

Ranks apply them to transformers' config objects, `coatcheck serve` to config.json before anything starts. Pure.
"""

from collections.abc import Mapping
from typing import Any

from coatcheck.proto.errors import InvalidConfig, InvalidModel


def check_model_kind(
    name: str, model_type: str, *, is_quantised: bool, is_multimodal: bool, is_encoder_decoder: bool
) -> None:
    """Raises InvalidModel for a kind of model that is not served. `is_multimodal`: it takes more than text as input."""
    if is_quantised:
        raise InvalidModel(f"{name} is quantised; only float32, bfloat16 and float16 checkpoints are served")
    if is_multimodal:
        raise InvalidModel(f"{model_type} takes more than text; serve its text-only checkpoint")
    if is_encoder_decoder:
        raise InvalidModel(f"{model_type} is an encoder-decoder; only decoder-only models are served")


def limit_max_model_len(asked: int | None, model_len: int, scaling: Mapping[str, Any]) -> int:
    """The max_model_len to serve: `asked`, else the model's own length.

    `model_len`: config.json's max_position_embeddings. `scaling`: its flat rope_parameters; empty if there are none or
    if they differ by kind of layer. With yarn the model's own length is the original length times the factor. With
    dynamic NTK `asked` may be up to the factor times longer. Raises InvalidConfig for a longer `asked`, because
    positions that the model was not trained for give nonsense.
    """
    longest = model_len
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    if kind == "yarn" and factor:
        stretched = int(factor * scaling.get("original_max_position_embeddings", model_len))
        model_len = longest = max(model_len, stretched)
    elif kind == "dynamic":
        longest = int(model_len * (factor or 1.0))
    if asked is not None and asked > longest:
        raise InvalidConfig(f"max-model-len is {asked}, but the model goes to {longest}; use at most that")
    return asked or model_len


def deterministic_experts_error(what: str) -> InvalidConfig:
    """The error for --deterministic with a mixture of experts; `what` names the experts."""
    return InvalidConfig(
        f"deterministic: {what} multiplies the tokens of one expert together, so a result depends on the other "
        "requests of the step; serve a mixture of experts without --deterministic"
    )


def check_deterministic_heads(head_dim: int) -> None:
    """Raises InvalidConfig for head sizes that --deterministic does not support on CPUs."""
    if head_dim % 16 or head_dim > 256:
        raise InvalidConfig(
            f"deterministic on CPU takes heads of a multiple of 16, at most 256 (here: {head_dim}); "
            "leave --deterministic out"
        )
