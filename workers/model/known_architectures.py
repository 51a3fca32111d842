"""KnownArchitectures: which model types the installed transformers builds as causal language models, from what configs.

The tables of transformers are read from its source files, because to import them takes seconds (torch). This module
reads no checkpoint.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel

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
_KINDS: Final = {"int", "float", "str", "bool", "list", "dict", "None"}  # what JSON has


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


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field of a config class. `kinds`: the types that transformers takes, by Python's names and "None"; empty if
    it takes others too. `default` is None if there is none, or none that can be read off."""

    kinds: frozenset[str]
    default: Any


@cache
def config_fields(model_type: str) -> dict[str, ConfigField]:
    """The fields that a model type's config class declares itself; empty if its source has another form."""
    name, module = _table(_CONFIGS, "CONFIG_MAPPING_NAMES").get(model_type), model_type.removesuffix("_text")
    for statement in _statements(f"models/{module}/configuration_{module}.py"):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            fields = (node for node in statement.body if isinstance(node, ast.AnnAssign))
            return {node.target.id: _field(node) for node in fields if isinstance(node.target, ast.Name)}
    return {}


def activations() -> frozenset[str]:
    """What a config may name as its activation; empty if it cannot be looked up."""
    return _keys("activations.py", "ACT2CLS")


def rope_types() -> frozenset[str]:
    """What a config may name as its rope_type; empty if it cannot be looked up."""
    types = _keys("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
    return types | {"default"} if types else types


@cache
def _keys(file: str, name: str) -> frozenset[str]:
    """The keys of a dict that a module assigns to `name`."""
    for statement in _statements(file):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(statement, "value", None)
            keys = value.keys if isinstance(value, ast.Dict) else []
            return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()


def _field(node: ast.AnnAssign) -> ConfigField:
    kinds = _kinds(node.annotation) - {"RopeParameters"}  # a TypedDict; always beside `dict`
    try:
        default = ast.literal_eval(node.value) if node.value is not None else None
    except ValueError:  # a call, or arithmetic
        default = None
    return ConfigField(kinds if kinds <= _KINDS else frozenset(), default)


def _kinds(annotation: ast.expr) -> frozenset[str]:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _kinds(left) | _kinds(right)
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            return frozenset({name})
        case ast.Constant(value=None):
            return frozenset({"None"})
    return frozenset({""})


def _statements(file: str) -> list[ast.stmt]:
    """Those of one of transformers' source files; none where it cannot be read."""
    package = util.find_spec("transformers")  # finds it without importing it
    try:
        return ast.parse((Path(str(package and package.origin)).parent / file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _literals(file: str, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """Every literal (key, value) list or dict in the statements that assign or update `name`."""
    for statement in _statements(f"models/auto/{file}"):
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
