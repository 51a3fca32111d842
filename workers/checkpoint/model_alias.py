"""Model types that are another type under a name of their own. Imports no torch.

Kimi K2's repository names a config class in its own code, which is DeepSeek V3's, and so are its model and tensors.
"""

from collections.abc import Mapping
from typing import Any, Final

_SAME_AS: Final = {"kimi_k2": "deepseek_v3"}


def is_alias(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")) in _SAME_AS


def resolve_alias(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json with the type that transformers has, without references to the checkpoint's code."""
    if not is_alias(config):
        return dict(config)
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    return kept | {"model_type": _SAME_AS[config["model_type"]]}
