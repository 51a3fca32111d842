"""The tables of transformers' config classes equal those of the installed transformers."""

from inspect import get_annotations
from typing import Any, get_args

import pytest
from packaging.version import Version
from transformers import CONFIG_MAPPING, __version__
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.workers.model.known_architectures import (
    ACTIVATIONS,
    CONFIG_FIELDS,
    ROPE_TYPES,
    TESTED_MODEL_TYPES,
)

# Fields that older releases of transformers lack. Their config objects keep such a field of config.json as it is.
_NEWER_FIELDS = {model_type: {"output_router_logits"} for model_type in ("deepseek_v2", "deepseek_v3")}


def json_types(annotation: Any) -> set[str]:
    """The names of an annotation's types, as in CONFIG_FIELDS; RopeParameters always stands beside dict."""
    types = get_args(annotation) if hasattr(annotation, "__or__") and get_args(annotation) else (annotation,)
    names = {getattr(kind, "__origin__", kind).__name__ for kind in types if kind is not RopeParameters}
    return {"None" if name == "NoneType" else name for name in names}


@pytest.mark.parametrize("model_type", sorted(TESTED_MODEL_TYPES))
def test_fields_are_those_of_the_config_class(model_type: str) -> None:
    """Each table has the fields that the class declares, with their types."""
    config = CONFIG_MAPPING[model_type]
    declared = get_annotations(config)
    ours = {name: set(kinds.split("|")) for name, kinds in CONFIG_FIELDS[model_type].items()}
    theirs = {name: json_types(annotation) for name, annotation in declared.items()}
    newer = _NEWER_FIELDS.get(model_type, set())
    if Version(__version__) < Version("5.23"):
        ours = {name: kinds for name, kinds in ours.items() if name in theirs or name not in newer}
    assert ours == theirs


def test_names_are_those_of_transformers() -> None:
    """Activations and rope types are those that transformers looks up."""
    assert set(ACT2CLS) == ACTIVATIONS
    assert {"default", *ROPE_INIT_FUNCTIONS} == ROPE_TYPES


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_sliding_window_that_is_not_switched_on_is_off(model_type: str) -> None:
    """qwen's config classes have a sliding window by default, which layers use only with use_sliding_window."""
    for switch, window in (({}, 0), ({"use_sliding_window": True}, 4096)):
        config = fill_defaults(ModelConfig("m", {"model_type": model_type, "num_hidden_layers": 40, **switch}))
        assert ModelShape.of(config).layers[-1].sliding_window == window
