"""What the installed transformers supports: model types, causal models, config fields, activations, RoPE types.

`coatcheck serve` checks config.json against these before Ray starts. They are parsed out of transformers' source files,
because importing transformers imports torch and takes seconds.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel

# Model types whose parity tests cover every usual config.json, so the checks of model_rules.py suffice. A model of
# another type must be built without weights to find out whether it can be served (meta_model.py).
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
_CONFIG_FILES: Final = ("auto_mappings.py", "configuration_auto.py")
_MODEL_FILES: Final = ("modeling_auto.py",)
_JSON_TYPES: Final = {"int", "float", "str", "bool", "list", "dict", "None"}


def check_known(name: str, model_type: str, *, has_auto_map: bool) -> None:
    """Raise InvalidModel for a model type that transformers does not know. `name`: of the model, for the error.

    `has_auto_map`: whether config.json refers to code in the checkpoint. Accepts every type if transformers' tables
    cannot be read.
    """
    configs = _table(_CONFIG_FILES, "CONFIG_MAPPING_NAMES")
    if not configs or model_type in configs:
        return
    also = "; code that comes with a checkpoint is never run" if has_auto_map else ""
    raise InvalidModel(
        f"{name}: config.json has model_type {model_type!r}, which transformers {metadata.version('transformers')} "
        f"does not know{also}; install a newer transformers, or correct config.json"
    )


def check_causal(name: str, model_type: str) -> None:
    """Raise InvalidModel for a model type without a causal language model. Accepts types that are not in the tables."""
    configs = _table(_CONFIG_FILES, "CONFIG_MAPPING_NAMES")
    models = _table(_MODEL_FILES, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if not configs or not models or model_type not in configs:
        return
    # transformers maps a config class to a model, and several types may share a config class.
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
        for node in _read_literals(file, name):
            found.update({key: value for key, value in node if isinstance(key, str) and isinstance(value, str)})
    return found


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field of a config class.

    `kinds`: the accepted types, by Python's names and "None"; empty if types that JSON lacks are accepted too.
    `default`: None also for a field without a default, or whose default is not a literal.
    """

    kinds: frozenset[str]
    default: Any


@cache
def config_fields(model_type: str) -> dict[str, ConfigField]:
    """The fields that a model type's config class declares itself, by name; empty if its source cannot be parsed."""
    name, module = _table(_CONFIG_FILES, "CONFIG_MAPPING_NAMES").get(model_type), model_type.removesuffix("_text")
    for statement in _parse_statements(f"models/{module}/configuration_{module}.py"):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            fields = (node for node in statement.body if isinstance(node, ast.AnnAssign))
            return {node.target.id: _read_field(node) for node in fields if isinstance(node.target, ast.Name)}
    return {}


def activations() -> frozenset[str]:
    """Names of activation functions; empty if transformers' source cannot be parsed."""
    return _dict_keys("activations.py", "ACT2CLS")


def rope_types() -> frozenset[str]:
    """Names of RoPE types; empty if transformers' source cannot be parsed."""
    types = _dict_keys("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
    return types | {"default"} if types else types


@cache
def _dict_keys(file: str, name: str) -> frozenset[str]:
    """The keys of the dict that `file` assigns to `name`."""
    for statement in _parse_statements(file):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(statement, "value", None)
            keys = value.keys if isinstance(value, ast.Dict) else []
            return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()


def _read_field(node: ast.AnnAssign) -> ConfigField:
    kinds = _annotated_types(node.annotation) - {"RopeParameters"}  # a TypedDict, always together with `dict`
    try:
        default = ast.literal_eval(node.value) if node.value is not None else None
    except ValueError:  # a call, or arithmetic
        default = None
    return ConfigField(kinds if kinds <= _JSON_TYPES else frozenset(), default)


def _annotated_types(annotation: ast.expr) -> frozenset[str]:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _annotated_types(left) | _annotated_types(right)
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            return frozenset({name})
        case ast.Constant(value=None):
            return frozenset({"None"})
    return frozenset({""})


def _parse_statements(file: str) -> list[ast.stmt]:
    """The statements of one of transformers' source files; none if it cannot be read."""
    package = util.find_spec("transformers")  # does not import it
    try:
        return ast.parse((Path(str(package and package.origin)).parent / file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _read_literals(file: str, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """The (key, value) pairs of every literal list or dict in the statements that assign or update `name`."""
    for statement in _parse_statements(f"models/auto/{file}"):
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
