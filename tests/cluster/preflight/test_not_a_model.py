"""A folder or a config.json that is no served model: `serve` and `plan` say in one line what it is and what to give."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.model import check_model, check_model_directory
from coatcheck.proto.errors import CoatcheckError
from tests.cluster import broken_models as broken
from tests.cluster.broken_models import edit_config, whole_model, write_shard

ADAPTER = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8}
WHOLE = "a directory with config.json and safetensors files"


def serve(model: Path) -> None:
    """The checks of `coatcheck serve` that read the model's files."""
    config = ServeConfig.build({"model": str(model), "device": "cpu"})
    check_model_directory(config)
    check_model(config)
    check_checkpoint(config)


def plan(model: Path) -> Sizing:
    return Sizing.of(PlanSettings.build({"model": str(model)}))


def said(command: Callable[[Path], object], model: Path) -> str:
    """The error of the command, which must be one line."""
    with pytest.raises(CoatcheckError) as error:
        command(model)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no config.json; it is empty: download the model into it, or give a Hugging Face model id"),
        ({"adapter_config.json": ADAPTER, "adapter_model.safetensors": {}},
         "it holds an adapter of org/base: serve the base model, with --lora-modules NAME=/"),
        ({"adapter_config.json": {}}, "it holds an adapter: serve the base model"),
        ({"model_index.json": {"_class_name": "StableDiffusionPipeline"}, "unet/config.json": {}},
         f"it holds a pipeline of diffusers, which is not served: give a model of transformers: {WHOLE}"),
        ({"a.onnx": {}, "README.md": {}}, "it holds ONNX weights alone (a.onnx), which are not read: give"),
        ({"model.safetensors": {}},
         f"it holds weights alone (model.safetensors): give a model of transformers: {WHOLE}"),
        ({"tokenizer.json": {}, "tokenizer_config.json": {}},
         "it holds a tokenizer alone: add config.json and the weights"),
        ({"params.json": {}, "consolidated.00.pth": {}}, "it holds a model in its maker's own format: give"),
        ({"snapshots/abc/config.json": {}, "refs/main": {}}, "/snapshots/abc: give that directory"),
        ({"my-model/config.json": {}}, "/my-model: give that directory"),
        ({"notes.txt": {}}, f"it holds no model: give a model of transformers: {WHOLE}"),
    ],
)  # fmt: skip
def test_a_folder_without_a_config(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    """Both commands look at what the folder has in place of a config.json."""
    folder = tmp_path / "given"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for command in (serve, plan):
        assert words in said(command, folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.onnx", f"holds ONNX weights, which are not read; give a model of transformers: {WHOLE}"),
        ("model.safetensors", "is a file of weights; give the directory that holds config.json"),
    ],
)
def test_a_file_of_weights(tmp_path: Path, name: str, words: str) -> None:
    """The model is a directory, and not one of its files."""
    (tmp_path / name).write_bytes(b"")
    for command in (serve, plan):
        assert words in said(command, tmp_path / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_model(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("changes", "words", "is_planned"),
    [
        ({"model_type": None}, "config.json has no model_type; add it, or fetch config.json again", True),
        ({"model_type": 5}, "config.json has model_type 5; it must be a text such as llama", True),
        ({"model_type": "rwkv7", "auto_map": {"AutoConfig": "a.B"}},
         "does not know; code that comes with a checkpoint is never run; install a newer transformers", True),
        ({"model_type": "frobnicator"}, "does not know; install a newer transformers, or correct config.json", True),
        ({"model_type": "vit"}, "has no causal language model of that type; only decoder-only text models", False),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "only decoder-only models are served", False),
        ({"model_type": None, "num_attention_heads": None, "_class_name": "UNet2DConditionModel"},
         "config.json is that of UNet2DConditionModel, a part of a diffusers pipeline; give a model of", False),
        ({"model_type": None, "num_attention_heads": None, "ssm_cfg": {}},
         "config.json is in the format of mamba_ssm, which is not read; give a model of transformers", False),
    ],
)  # fmt: skip
def test_a_model_type_that_is_not_served(
    whole: Path, tmp_path: Path, changes: dict[str, Any], words: str, is_planned: bool
) -> None:
    """`plan` sizes a type that a newer transformers may know, and notes that `serve` refuses it."""
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    edit_config(model, **changes)
    assert words in said(serve, model)
    if not is_planned:
        assert words in said(plan, model)
    else:
        (note,) = (note for note in plan(model).notes if "refuses" in note)
        assert note.startswith("`coatcheck serve` refuses this model: ") and words in note


@pytest.mark.parametrize("model_type", ["mpt", "dbrx"])
def test_sizes_under_other_names(whole: Path, tmp_path: Path, model_type: str) -> None:
    """`plan` says how to find out whether the type is served, before somebody adds fields to its config.json."""
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    edit_config(model, model_type=model_type, d_model=64, n_heads=8, n_layers=2, num_attention_heads=None)
    words = f"which sizing needs; add it; `coatcheck verify` says whether model type {model_type} is served at all"
    assert words in said(plan, model)


def test_an_adapter_beside_the_config_of_its_base(whole: Path, tmp_path: Path) -> None:
    """An adapter that was saved with a config.json and a tokenizer has no weights of a model."""
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    for file in model.glob("model*"):
        file.unlink()
    write_shard(model / "adapter_model.safetensors", {"base_model.model.lora_A.weight": (8, 64)})
    (model / "adapter_config.json").write_text(json.dumps(ADAPTER))
    assert "has no weights of a model; it holds an adapter of org/base: serve the base model, with" in said(
        serve, model
    )


def test_weights_that_are_missing_or_of_another_format(whole: Path, tmp_path: Path) -> None:
    """Without any file of weights they are to be fetched; those of another format are to be converted."""
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    for file in model.glob("*.safetensors*"):
        file.unlink()
    assert "has no safetensors file; fetch the model's weights too" in said(serve, model)
    (model / "model.onnx").write_bytes(b"")
    assert "(it has model.onnx); other weight formats are not read: convert the weights" in said(serve, model)
    broken.keep_a_pickle_alone(model)
    assert "(it has model.onnx, pytorch_model.bin)" in said(serve, model)
