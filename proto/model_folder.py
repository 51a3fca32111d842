"""describe_other_path, no_type_error: what a path or a config.json holds that is no model of transformers.

Users give an adapter, ONNX weights or a part of a diffusers pipeline as a model. The errors say what it is, and what
to give instead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object

# {end of a file's name: what the file holds}.
_WEIGHTS: Final = {
    ".onnx": "ONNX weights",
    ".safetensors": "weights",
    ".bin": "weights",
    ".pt": "weights",
    ".pth": "weights",
    ".h5": "weights",
    ".msgpack": "weights",
}
_GIVE_MODEL: Final = "give a model of transformers: a directory with config.json and safetensors files"


def describe_other_path(path: Path) -> str:
    """What is wrong with a directory without a config.json, or with a file that is no config.json, and what to give."""
    if path.is_dir():
        return f"{path} has no config.json; {_describe_folder(path)}"
    kind = _WEIGHTS.get(path.suffix, "")
    if kind.partition(" ")[2]:
        return f"{path} holds {kind}, which are not read; {_GIVE_MODEL}"
    return f"{path} is a file{' of weights' if kind else ''}; give the directory that holds config.json"


def is_weights_file(path: Path) -> bool:
    """Whether the name of a file is one of weights."""
    return path.suffix in _WEIGHTS


def no_type_error(name: str, values: Mapping[str, Any]) -> InvalidModel:
    """The error for the fields of a config.json whose model_type is missing or no text. `name`: of the model."""
    if (model_type := values.get("model_type")) not in (None, ""):
        return InvalidModel(f"{name}: config.json has model_type {model_type!r}; it must be a text such as llama")
    if isinstance(part := values.get("_class_name"), str):
        return InvalidModel(f"{name}: config.json is that of {part}, a part of a diffusers pipeline; {_GIVE_MODEL}")
    if "ssm_cfg" in values:
        return InvalidModel(f"{name}: config.json is in the format of mamba_ssm, which is not read; {_GIVE_MODEL}")
    return InvalidModel(f"{name}: config.json has no model_type; add it, or fetch config.json again")


def find_adapter(directory: Path) -> str | None:
    """What to do with a directory that holds a LoRA adapter; None if it holds none."""
    try:
        values = read_json_object(directory / "adapter_config.json")
    except InvalidModel:
        return None
    if values is None:
        return None
    base = values.get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return f"it holds an adapter{of}: serve the base model, with --lora-modules NAME={directory}"


def _describe_folder(directory: Path) -> str:
    if (advice := find_adapter(directory)) is not None:
        return advice
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        entries = []
    if not entries:
        return "it is empty: download the model into it, or give a Hugging Face model id"
    names = {entry.name for entry in entries}
    if "model_index.json" in names:
        return f"it holds a pipeline of diffusers, which is not served: {_GIVE_MODEL}"
    # The hub's cache has a folder of snapshots for each model.
    inner = [
        file.parent for pattern in ("*", "snapshots/*") for file in sorted(directory.glob(f"{pattern}/config.json"))
    ]
    if inner:
        return f"it holds a model in {inner[-1]}: give that directory"
    if "params.json" in names:
        return f"it holds a model in its maker's own format: {_GIVE_MODEL}"
    for entry in entries:
        if kind := _WEIGHTS.get(entry.suffix):
            also = ", which are not read" if kind.partition(" ")[2] else ""
            return f"it holds {kind} alone ({entry.name}){also}: {_GIVE_MODEL}"
    if names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}:
        return "it holds a tokenizer alone: add config.json and the weights"
    return f"it holds no model: {_GIVE_MODEL}"
