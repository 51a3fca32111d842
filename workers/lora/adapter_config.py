"""AdapterConfig: adapter_config.json of a LoRA adapter, as PEFT writes it. Imports no torch.

A field whose value makes the adapter more than plain LoRA is refused by name.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object

_MERGE_HINT: Final = "merge the adapter into its base model (PEFT's merge_and_unload) and serve the result"
# Field that makes an adapter more than plain LoRA -> the values that turn it off, and what other values mean.
_REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "bias": ((None, "none"), "biases of the base model are trained too"),
    "lora_bias": ((None, False), "B has a bias"),
    "fan_in_fan_out": ((None, False), "weights are stored transposed"),
    "modules_to_save": ((None, [], ()), "whole modules are trained beside the adapter"),
    "trainable_token_indices": ((None, [], {}), "embeddings of tokens are trained"),
    "target_parameters": ((None, [], ()), "parameters of experts are adapted"),
    "layer_replication": ((None, []), "layers of the base model are repeated"),
    "alora_invocation_tokens": ((None, []), "the adapter begins in the middle of a prompt"),
}
# PEFT's variants of LoRA have fields called use_NAME or NAME_config. rsLoRA is served, and the other four only change
# how A and B are initialised.
_HARMLESS_VARIANTS: Final = ("use_rslora", "eva_config", "loftq_config", "lora_ga_config", "corda_config")
# Values of init_lora_weights that leave the base model as it is. The others (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA)
# change its weights.
_INITS_THAT_KEEP_THE_BASE: Final = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`rank_pattern`, `alpha_pattern`: {regular expression: rank or alpha of the modules that match}. The expression
    must match the whole name of a module, or its end behind a dot. The first match counts. `rank`, `alpha`: of all
    other modules."""

    rank: float
    alpha: float
    uses_rslora: bool
    rank_pattern: dict[str, float]
    alpha_pattern: dict[str, float]

    def rank_of(self, module: str) -> float:
        """The rank of a module. `module`: its name in the model that the adapter was trained on."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """The factor of (x A^T) B^T: alpha / rank, or alpha / sqrt(rank) with rsLoRA. `module`: see `rank_of`."""
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.uses_rslora else rank)


def read_adapter_config(name: str, directory: Path) -> AdapterConfig:
    """Read and check the config of the adapter `name`. Raises InvalidModel with the field and what to change."""
    fields = read_json_object(directory / "adapter_config.json")
    if fields is None:
        raise InvalidModel(
            f"lora-modules {name}: {directory} has no adapter_config.json; give the directory that PEFT's "
            "save_pretrained has written"
        )
    if (kind := fields.get("peft_type")) != "LORA":
        raise InvalidModel(f"lora-modules {name}: peft_type is {kind!r}, and only LORA is served; {_MERGE_HINT}")
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        raise InvalidModel(f"lora-modules {name}: task_type is {task!r}, and only CAUSAL_LM is served")
    _refuse_variants(name, fields)
    if (init := fields.get("init_lora_weights")) not in _INITS_THAT_KEEP_THE_BASE:
        raise InvalidModel(
            f"lora-modules {name}: init_lora_weights is {init!r}, so the adapter fits a changed base model; save it "
            "with PEFT's path_initial_model_for_weight_conversion, which makes it an adapter of the original one"
        )
    if (uses_rslora := fields.get("use_rslora")) not in (None, False, True):
        raise InvalidModel(f"lora-modules {name}: use_rslora is {uses_rslora!r}; it must be true or false")
    rank, alpha = _read_number(name, "r", fields), _read_number(name, "lora_alpha", fields)
    patterns = [_read_pattern(name, field, fields) for field in ("rank_pattern", "alpha_pattern")]
    for rank_field, value in (("r", rank), *(("a rank in rank_pattern", value) for value in patterns[0].values())):
        if value <= 0:
            raise InvalidModel(f"lora-modules {name}: {rank_field} is {value:g}; a rank must be above 0")
    return AdapterConfig(rank, alpha, bool(uses_rslora), *patterns)


def _refuse_variants(name: str, fields: Mapping[str, Any]) -> None:
    variants = [key for key in fields if re.fullmatch(r"use_\w+|\w+_config", key) and key not in _HARMLESS_VARIANTS]
    refused = {**{key: ((None, False, {}), "a variant of LoRA") for key in variants}, **_REFUSED}
    for field, (unset, meaning) in refused.items():
        if (value := fields.get(field)) not in unset:
            raise InvalidModel(
                f"lora-modules {name}: {field} is {value!r} in adapter_config.json ({meaning}), which is not served; "
                f"{_MERGE_HINT}"
            )


def _read_number(name: str, field: str, fields: Mapping[str, Any]) -> float:
    if not _is_number(value := fields.get(field)):
        raise InvalidModel(
            f"lora-modules {name}: {field} is {value!r} in adapter_config.json; it must be a number: save the adapter "
            "again"
        )
    return float(value)


def _read_pattern(name: str, field: str, fields: Mapping[str, Any]) -> dict[str, float]:
    pattern = fields.get(field) or {}
    if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
        raise InvalidModel(
            f"lora-modules {name}: {field} is {pattern!r} in adapter_config.json; it must map regular expressions to "
            "numbers: save the adapter again"
        )
    for key in pattern:
        try:
            re.compile(_module_regex(key))
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidModel(
                f"lora-modules {name}: the key {key!r} of {field} in adapter_config.json is no regular expression "
                f"({error}); correct it"
            ) from None
    return {key: float(value) for key, value in pattern.items()}


def _first_match(pattern: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in pattern.items() if re.match(_module_regex(key), module)), default)


def _module_regex(key: str) -> str:
    """The regular expression that PEFT makes of a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({key})$"


def _is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number that a float can hold. NaN and infinity are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
