"""Checkpoints with the config.json, tensors and shards of published models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.workers.attention.state_layers import correct_dt_limits
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoint.published_checkpoints import CONFIGS, write_published


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_checkpoint_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """60 greedy tokens equal those of transformers with the dequantised weights; code of the repository is not run,
    layers for multi-token prediction are not loaded, and the plan counts the bytes that the rank holds."""
    path, plain = write_published(name, tmp_path)
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    correct_dt_limits(reference)
    reference.generation_config.eos_token_id = None
    prompt = [3 + 7 * place % 600 for place in range(90)]  # more than the length before YaRN
    ids = torch.tensor([prompt])
    wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)  # type: ignore[misc]
    assert PagedDriver(model).greedy([prompt], 60, chunk=32)[0] == wanted[0, 90:].tolist()
    planned = Sizing.of(PlanSettings(model=str(path), dtype="float32", device="cpu"))
    assert planned.weight_bytes == model.spec.weight_bytes


@pytest.mark.parametrize("name", ["DeepSeek-R1", "GLM-4.5"])
def test_the_bias_that_chooses_experts_is_not_rounded(name: str, tmp_path: Path) -> None:
    """Served in bfloat16, the correction bias of the router keeps the values of the checkpoint: differences of 0.01 at
    15, as the published ones have, decide. The plan counts it in float32."""
    path, _ = write_published(name, tmp_path)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    file = path / json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][key]
    bias = 15 + 0.01 * torch.arange(8)
    save_file(load_file(file) | {key: bias}, file, {"format": "pt"})
    model = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu")
    mlp = model._body._layers[1][0].mlp  # type: ignore[attr-defined]
    assert torch.equal(mlp.moe.routing.correction, bias)
    planned = Sizing.of(PlanSettings(model=str(path), dtype="bfloat16", device="cpu"))
    assert planned.weight_bytes == model.spec.weight_bytes
