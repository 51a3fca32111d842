"""Checks of a model that need only its config.json and the settings.

`coatcheck serve` applies them before anything starts, the ranks again to transformers' config objects.
"""

from collections.abc import Mapping
from typing import Any

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES


def check_model_kind(model_type: str, *, is_multimodal: bool, is_encoder_decoder: bool) -> None:
    """Raise InvalidModel for a kind of model that is not served.

    `is_multimodal`: the model takes more than text, and its text model cannot be served alone (text_tower.py).
    """
    if is_multimodal:
        raise InvalidModel(
            f"{model_type} is multimodal, and its text model is not served; the text models of these types are: "
            f"{', '.join(sorted(MULTIMODAL_TYPES))}"
        )
    if is_encoder_decoder:
        raise InvalidModel(f"{model_type} is an encoder-decoder; only decoder-only models are served")


def resolve_max_model_len(requested: int | None, model_len: int, rope_parameters: Mapping[str, Any]) -> int:
    """The max_model_len to serve: `requested`, else the model's own length.

    `model_len`: config.json's max_position_embeddings. `rope_parameters`: of config.json; empty if absent, or if they
    differ by layer type. With yarn the model's own length is the original length times the factor. With dynamic NTK
    `requested` may be up to the factor times longer. Raises InvalidConfig for more than that: the model was not trained
    for such positions.
    """
    longest = model_len
    kind, factor = rope_parameters.get("rope_type"), rope_parameters.get("factor")
    if kind == "yarn" and factor:
        stretched = int(factor * rope_parameters.get("original_max_position_embeddings", model_len))
        model_len = longest = max(model_len, stretched)
    elif kind == "dynamic":
        longest = int(model_len * (factor or 1.0))
    if requested is not None and requested > longest:
        raise InvalidConfig(f"max-model-len is {requested}, but the model supports {longest}; use at most that")
    return requested or model_len


def deterministic_experts_error(module: str, model_type: str) -> InvalidConfig:
    """The error for --deterministic with a mixture of experts whose router is transformers' own code."""
    return InvalidConfig(
        f"deterministic: {module} of {model_type} is behind a router that our batch-invariant kernels do not compute; "
        "serve it without --deterministic"
    )


def check_deterministic_heads(head_dim: int) -> None:
    """Raise InvalidConfig for a head size that --deterministic does not support on CPUs."""
    if head_dim % 16 or head_dim > 256:
        raise InvalidConfig(
            f"deterministic on CPU needs a head_dim that is a multiple of 16 and at most 256 (here: {head_dim}); "
            "leave --deterministic out"
        )
