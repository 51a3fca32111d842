"""AdapterConfig: adapter_config.json of a LoRA adapter, as PEFT writes it. No torch.

A field that asks for more than plain LoRA is refused by name.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object

_MERGE: Final = "merge the adapter into its base model (PEFT's merge_and_unload) and serve the result"
# Fields that change what an adapter computes -> the values that change nothing, and what other values mean.
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
# Variants of LoRA have fields called use_NAME or NAME_config. These five only change the training, or are served.
_HARMLESS: Final = ("use_rslora", "eva_config", "loftq_config", "lora_ga_config", "corda_config")
# Ways to initialise that leave the base model as it is. The others (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA) change its
# weights.
_PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`alpha_pattern`: regular expression -> alpha of the modules whose name, or its end behind a dot, matches. The
    first match counts. Ranks are those of the tensors."""

    alpha: float
    uses_rslora: bool
    alpha_pattern: dict[str, float]

    def scale(self, module: str, rank: int) -> float:
        """What the product of A and B is multiplied with. `module`: its name in the model that was adapted. `rank`: of
        the module's A."""
        matches = (alpha for key, alpha in self.alpha_pattern.items() if re.match(_pattern(key), module))
        alpha = next(matches, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_adapter_config(name: str, directory: Path) -> AdapterConfig:
    """Read and check the config of the adapter `name`. Raises InvalidModel with the field and what to change."""
    fields = read_json_object(directory / "adapter_config.json")
    if fields is None:
        raise InvalidModel(
            f"lora-modules {name}: {directory} has no adapter_config.json; give the directory that PEFT's "
            "save_pretrained has written"
        )
    if (kind := fields.get("peft_type")) != "LORA":
        raise InvalidModel(f"lora-modules {name}: peft_type is {kind!r}, and only LORA is served; {_MERGE}")
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        raise InvalidModel(f"lora-modules {name}: task_type is {task!r}, and only CAUSAL_LM is served")
    variants = [key for key in fields if re.fullmatch(r"use_\w+|\w+_config", key) and key not in _HARMLESS]
    refused = {**{key: ((None, False, {}), "a variant of LoRA") for key in variants}, **_REFUSED}
    for field, (harmless, meaning) in refused.items():
        if (value := fields.get(field)) not in harmless:
            raise InvalidModel(
                f"lora-modules {name}: {field} is {value!r} in adapter_config.json ({meaning}), which is not served; "
                f"{_MERGE}"
            )
    if (start := fields.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise InvalidModel(
            f"lora-modules {name}: init_lora_weights is {start!r}, so the adapter fits a changed base model; save it "
            "with PEFT's path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    alphas, alpha, rank = fields.get("alpha_pattern") or {}, fields.get("lora_alpha"), fields.get("r")
    numbers = [alpha, *alphas.values()] if isinstance(alphas, dict) else [None]
    if not all(map(_is_number, [rank, *numbers])):
        raise InvalidModel(
            f"lora-modules {name}: adapter_config.json has r {rank!r}, lora_alpha {alpha!r} and alpha_pattern "
            f"{alphas!r}; every rank and alpha must be a number: save the adapter again"
        )
    for key in alphas:
        try:
            re.compile(_pattern(key))
        except re.error as error:
            raise InvalidModel(
                f"lora-modules {name}: the key {key!r} of alpha_pattern in adapter_config.json is no regular "
                f"expression ({error}); correct it"
            ) from None
    values = {key: float(value) for key, value in alphas.items()}
    return AdapterConfig(float(str(alpha)), bool(fields.get("use_rslora")), values)


def _pattern(key: str) -> str:
    """The regular expression that PEFT makes of a key of alpha_pattern."""
    return rf"(.*\.)?({key})$"


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold. NaN and infinity are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
