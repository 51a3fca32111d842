"""What is refused of a quantised checkpoint, before weights are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS, edit_quantisation


@pytest.fixture(scope="module")
def source(checkpoint_directory: Path) -> Path:
    return tiny_checkpoint("llama", checkpoint_directory)


def drop(leaf: str) -> Callable[[Path], None]:
    """Removes the stored tensors with this last name."""

    def fault(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] != leaf}
        assert len(kept) < len(tensors)
        save_file(kept, path / "model.safetensors", {"format": "pt"})

    return fault


def change(leaf: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Replaces the stored tensors with this last name."""

    def fault(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        changed = {
            name: make(tensor).contiguous() if name.rpartition(".")[2] == leaf else tensor
            for name, tensor in tensors.items()
        }
        save_file(changed, path / "model.safetensors", {"format": "pt"})

    return fault


def rename(leaf: str, other: str) -> Callable[[Path], None]:
    """Gives the stored tensors with the last name `leaf` the last name `other`."""

    def fault(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        renamed = {name.replace(f".{leaf}", f".{other}"): tensor for name, tensor in tensors.items()}
        save_file(renamed, path / "model.safetensors", {"format": "pt"})

    return fault


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda path: edit_quantisation(path, **fields)


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("awq", config(quant_method="hqq"), "quantised with 'hqq', which is not served; use a checkpoint with one of"),
        ("awq", config(version="gemv"), "AWQ of 4 bits in the gemv layout, which is not served; use AWQ of 4 bits in"),
        ("awq", config(bits="many"), "quantization_config in config.json is malformed"),
        ("awq", config(group_size=40), "groups of 40 do not divide the 96 columns of model.layers.0"),
        (
            "awq",
            config(group_size=16),
            r"scales has shape \[3, 64\], its weight implies \[6, 64\]: .* fetch both again",
        ),
        ("awq", drop("scales"), "the checkpoint lacks .*proj.scales; fetch it again"),
        ("awq", drop("qzeros"), "the checkpoint lacks .*proj.qzeros; fetch it again"),
        ("awq", change("qweight", lambda x: x.float()), "proj.qweight is stored as F32, not as I32"),
        ("awq", change("qweight", lambda x: x.flatten()), r"proj.qweight has shape \[\d+\]; it should be a matrix"),
        ("gptq", change("qweight", lambda x: x.flatten()), r"proj.qweight has shape \[\d+\]; it should be a matrix"),
        ("gptq", config(bits=3), "GPTQ of 3 bits in the gptq layout, which is not served; use 2, 4 or 8 bits"),
        ("gptq", config(checkpoint_format="marlin"), "in the marlin layout, which is not served"),
        ("gptq", change("g_idx", lambda x: x[1:]), "g_idx has shape .* belong together; fetch both again"),
        ("fp8-block", config(fmt="e5m2"), "FP8 e5m2, which is not served; use an e4m3 checkpoint"),
        ("fp8-block", config(weight_block_size=[8]), "quantization_config in config.json is malformed"),
        ("fp8-block", config(weight_block_size=[16, 16]), "weight_scale_inv has shape"),
        ("fp8-block", config(weight_block_size=[0, 40]), "config.json is malformed .blocks of 0 rows and 40 columns"),
        ("fp8-block", drop("weight_scale_inv"), "the checkpoint lacks .*weight_scale; fetch it again"),
        ("compressed-w8a16", config(format="mxfp6-quantized"), "compressed-tensors format mxfp6-quantized"),
        ("compressed-w8a16", config(sparsity_config={"format": "sparse-24-bitmask"}), "the sparse format sparse-24"),
        ("compressed-w8a16", config(transform_config={"config_groups": {"a": {}}}), "transforms of activations"),
        ("compressed-w8a16", drop("weight_shape"), "the checkpoint lacks .*weight_shape; fetch it again"),
        ("compressed-w8a16", change("weight_packed", lambda x: x[:, 1:]), "bits a weight; 2, 4 and 8 are served"),
        ("compressed-w8a16", change("weight_packed", lambda x: x.flatten()), "weight_packed .* should be a matrix"),
        ("compressed-fp8-channel", change("weight_scale", lambda x: x[:, :0]), r"weight_scale has shape \[\d+, 0\]"),
        ("compressed-fp8-channel", change("weight_scale", lambda x: x[..., None]), r"has shape \[\d+, 1, 1\], its"),
        ("compressed-fp8-channel", drop("weight_scale"), "config.json says that it is quantised .* but no tensor is"),
        ("compressed-nvfp4", drop("weight_global_scale"), "the checkpoint lacks .*weight_global_scale; fetch it again"),
        (
            "compressed-nvfp4",
            change("weight_scale", lambda x: x.float()),
            "weight_scale is stored as F32, not as F8_E4M3",
        ),
        ("compressed-nvfp4", change("weight_scale", lambda x: x[:, :0]), r"weight_scale has shape \[\d+, 0\]"),
        ("compressed-nvfp4", change("weight_scale", lambda x: x[:, 1:]), "weight_scale has shape .* fetch both again"),
        ("compressed-nvfp4", change("weight_global_scale", lambda x: x.repeat(2)), "weight_global_scale has shape"),
        ("modelopt-nvfp4", config(quant_algo="NVFP4_AWQ"), "ModelOpt's NVFP4_AWQ, which is not served; use one of FP8"),
        (
            "modelopt-nvfp4",
            rename("input_scale", "pre_quant_scale"),
            "pre_quant_scale scales activations, which is not",
        ),
        ("modelopt-nvfp4", drop("weight_scale_2"), "the checkpoint lacks .*weight_scale_2; fetch it again"),
        ("modelopt-fp8", drop("weight_scale"), "the checkpoint lacks .*weight_scale; fetch it again"),
        ("nf4", config(bnb_4bit_quant_type="fp4"), "bitsandbytes fp4, which is not served; use an nf4 checkpoint"),
        ("nf4", config(load_in_4bit=False), "bitsandbytes int8, which is not served"),
        ("nf4", drop("absmax"), "the checkpoint lacks .*weight.absmax; fetch it again"),
        ("nf4", change("bitsandbytes__nf4", lambda x: x[2:]), "bitsandbytes__nf4 cannot be read"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_weights_are_read(
    kind: str, fault: Callable[[Path], None], said: str, source: Path, tmp_path: Path
) -> None:
    """A method, a variant or a stored tensor that does not fit is refused with what to change."""
    path = tmp_path / "broken"
    FORMATS[kind](source, path)
    Checkpoint.open(str(path)).close()
    fault(path)
    with pytest.raises(InvalidModel, match=said):
        Checkpoint.open(str(path))


def test_quantised_tensors_without_a_config_are_refused(source: Path, tmp_path: Path) -> None:
    """Codes are never taken for weights."""
    path = tmp_path / "no-config"
    FORMATS["fp8-block"](source, path)
    file = path / "config.json"
    values = json.loads(file.read_text())
    del values["quantization_config"]
    file.write_text(json.dumps(values))
    with pytest.raises(InvalidModel, match="stored as F8_E4M3; only F32, BF16, F16 are served unless"):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
