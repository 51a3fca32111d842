"""Quantised checkpoints give the weights, and the tokens, that their codes stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS
from tests.workers.ranks import run_ranks


def greedy(communicator: Communicator, path: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of one rank, served in float32."""
    model = load_model(path, communicator=communicator, dtype="float32", device="cpu")
    return PagedDriver(model).greedy([prompt], max_tokens, chunk=16)[0]


def rank_greedy(communicator: Communicator, argument: tuple[Path, list[int]]) -> list[int]:
    """What one rank of a group computes."""
    return greedy(communicator, *argument, max_tokens=8)


@pytest.fixture(scope="module")
def source(checkpoint_directory: Path) -> Path:
    return tiny_checkpoint("llama", checkpoint_directory)


@pytest.fixture(params=FORMATS)
def quantised(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A quantised checkpoint, and the weights that it stands for."""
    path = tmp_path / "quantised"
    return path, FORMATS[request.param](source, path)


def test_weights_and_their_slices_are_what_the_codes_stand_for(quantised: tuple[Path, dict[str, Tensor]]) -> None:
    """Every weight, and every slice of rows or columns that a rank may load, equals the writer's own weight to 1e-6 of
    the largest; slices that cut groups too."""
    path, plain = quantised
    with Checkpoint.open(str(path)) as checkpoint:
        assert checkpoint.entries.keys() == plain.keys()
        for name, wanted in plain.items():
            assert checkpoint.entries[name].shape == tuple(wanted.shape)
            if not name.endswith("_proj.weight"):
                continue
            whole = checkpoint.read(name, dtype=torch.float32)
            error = 1e-6 * float(wanted.abs().max())
            torch.testing.assert_close(whole, wanted.float(), rtol=0, atol=error)
            rows, columns = wanted.shape
            for dim, ranges in (
                (0, ((rows // 2, rows),)),
                (0, ((rows // 4, rows // 2), (rows - 8, rows))),
                (0, ((3, rows - 1),)),
                (1, ((0, columns // 2),)),
                (1, ((7, 40),)),
            ):
                part = checkpoint.read(name, TensorSlice(dim, ranges), torch.float32)
                cut = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
                torch.testing.assert_close(part, cut, rtol=0, atol=0)
            assert checkpoint.slice_bytes(name, None) < wanted.numel() * 2  # less than bfloat16


def test_tokens_are_those_of_the_dequantised_model(
    quantised: tuple[Path, dict[str, Tensor]], source: Path, tmp_path: Path
) -> None:
    """Served in float32, a quantised checkpoint gives the greedy tokens that transformers gives with the dequantised
    weights."""
    path, plain = quantised
    reference = shutil.copytree(source, tmp_path / "plain")
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()}, reference / "model.safetensors", {"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    prompt = [3 + 7 * place % 190 for place in range(30)]
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)  # type: ignore[misc]
    assert greedy(Communicator(), path, prompt, 60) == wanted[0, 30:].tolist()


def test_settings_of_modelopt_are_read_from_their_own_file(source: Path, tmp_path: Path) -> None:
    """A checkpoint whose settings are in hf_quant_config.json alone is the one with them in config.json, for the plan
    too."""
    inside, separate = tmp_path / "inside", tmp_path / "separate"
    FORMATS["modelopt-nvfp4"](source, inside)
    shutil.copytree(inside, separate)
    config = json.loads((separate / "config.json").read_text())
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    del config["quantization_config"]
    (separate / "config.json").write_text(json.dumps(config))
    (separate / "hf_quant_config.json").write_text(json.dumps(settings))
    name = "model.layers.0.mlp.down_proj.weight"
    with Checkpoint.open(str(inside)) as one, Checkpoint.open(str(separate)) as other:
        assert one.is_quantised(name) and torch.equal(one.read(name), other.read(name))
    planned = [Sizing.of(PlanSettings(model=str(path), device="cpu")).weight_bytes for path in (inside, separate)]  # type: ignore[arg-type]
    assert planned[0] == planned[1]


def test_ranks_hold_their_parts_of_a_quantised_model(source: Path, tmp_path: Path) -> None:
    """Two ranks give the tokens of one, although a group of columns lies on both."""
    path = tmp_path / "awq"
    FORMATS["awq"](source, path)
    prompt = [3 + 5 * place % 190 for place in range(20)]
    alone = greedy(Communicator(), path, prompt, 8)
    assert run_ranks(2, rank_greedy, (path, prompt)) == [alone, alone]
