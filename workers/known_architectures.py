"""KnownArchitectures: which model types the installed transformers can build as causal language models.

The tables of transformers are read from its source files, because to import them takes seconds (torch). This module
reads no checkpoint.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from ..proto.errors import InvalidModel

# Model types whose parity tests cover every ordinary config.json; for them the checks of model_rules.py suffice.
# Whether a model of another type can be served is known only after building it without weights.
TESTED_MODEL_TYPES: Final = frozenset(
    (
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    )
)
_CONFIGS: Final = ("auto_mappings.py", "configuration_auto.py")
_MODELS: Final = ("modeling_auto.py",)


def check_known(name: str, model_type: str, *, has_auto_map: bool) -> None:
    """Raises InvalidModel for a model type that transformers does not know.

    `has_auto_map`: config.json names code that comes with the checkpoint. Passes every type if the tables of the
    installed transformers cannot be read.
    """
    configs = _table(_CONFIGS, "CONFIG_MAPPING_NAMES")
    if not configs or model_type in configs:
        return
    also = "; code that comes with a checkpoint is never run" if has_auto_map else ""
    raise InvalidModel(
        f"{name}: config.json has model_type {model_type!r}, which transformers {metadata.version('transformers')} "
        f"does not know{also}; install a newer transformers, or correct config.json"
    )


def check_causal(name: str, model_type: str) -> None:
    """Raises InvalidModel for a model type without a causal language model. Passes types that are not in the tables."""
    configs = _table(_CONFIGS, "CONFIG_MAPPING_NAMES")
    models = _table(_MODELS, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if not configs or not models or model_type not in configs:
        return
    # transformers finds a model by its config's class, which several types may share.
    if configs[model_type] not in {configs[causal] for causal in models if causal in configs}:
        raise InvalidModel(
            f"{name}: config.json has model_type {model_type!r}, and transformers {metadata.version('transformers')} "
            "has no causal language model of that type; only decoder-only text models are served"
        )


@cache
def _table(files: tuple[str, ...], name: str) -> dict[str, str]:
    """The mapping `name` of transformers' auto classes, merged from `files`; empty if it is not found."""
    found: dict[str, str] = {}
    for file in files:
        for node in _literals(file, name):
            found.update({key: value for key, value in node if isinstance(key, str) and isinstance(value, str)})
    return found


def _literals(file: str, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """Every literal (key, value) list or dict in the statements that assign or update `name`."""
    package = util.find_spec("transformers")  # finds it without importing it
    try:
        source = (Path(str(package and package.origin)).parent / "models" / "auto" / file).read_text(encoding="utf-8")
        statements = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        return
    for statement in statements:
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) or statement.value is None:
            continue
        if name not in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}:
            continue
        for node in ast.walk(statement.value):
            if isinstance(node, ast.List | ast.Dict):
                try:
                    value = ast.literal_eval(node)
                    yield list(dict(value).items())
                except (ValueError, TypeError):
                    continue
