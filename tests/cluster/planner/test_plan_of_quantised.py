"""A plan counts quantised weights as a loaded model holds them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from tests.workers.checkpoint.claimed_gpu import cpu_as_gpu
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.model.architectures import write
from tests.workers.quantised_checkpoints import FORMATS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_of_a_quantised_checkpoint_are_those_loaded(kind: str, dtype: str, source: Path, tmp_path: Path) -> None:
    """Of every served format the planned bytes are exactly those that a rank reports, on a CPU and on a GPU."""
    path = tmp_path / "quantised"
    FORMATS[kind](source, path)
    for device in ("cpu", "cuda") if dtype == "bfloat16" else ("cpu",):
        with cpu_as_gpu() if device == "cuda" else nullcontext():
            spec = load_model(path, communicator=Communicator(), dtype=dtype, device="cpu").spec
        planned = Sizing.of(PlanSettings(model=str(path), dtype=dtype, device=device))  # type: ignore[arg-type]
        assert planned.weight_bytes == spec.weight_bytes < spec.num_weights * (4 if dtype == "float32" else 2) + 1


def test_experts_of_nvfp4_are_counted_as_held(tmp_path: Path) -> None:
    """On a CPU with scales in e4m3, on a GPU with scales in float32."""
    path = tmp_path / "quantised"
    FORMATS["modelopt-nvfp4"](tiny_checkpoint("qwen3-moe", tmp_path / "plain"), path)
    held = {}
    for device in ("cpu", "cuda"):
        with cpu_as_gpu() if device == "cuda" else nullcontext():
            spec = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu").spec
        planned = Sizing.of(PlanSettings(model=str(path), dtype="bfloat16", device=device))  # type: ignore[arg-type]
        assert planned.weight_bytes == spec.weight_bytes
        held[device] = spec.weight_bytes
    assert held["cpu"] < held["cuda"]


@pytest.mark.parametrize(
    "kind",
    [
        "compressed-w8a16",
        "compressed-w8a8-int",
        "compressed-fp8-channel",
        "compressed-fp8-block",
        "compressed-w4a16-g32",
    ],
)
def test_scales_of_two_bytes_are_counted_as_held(kind: str, source: Path, tmp_path: Path) -> None:
    """Published checkpoints have scales in bfloat16. GPUs hold those of rows of 8-bit codes in float32; the plan counts
    the scales that the packed linears hold, whatever --activation-quantization says."""
    path = tmp_path / "quantised"
    FORMATS[kind](source, path)
    file = path / "model.safetensors"
    stored = load_file(file)
    stored |= {key: part.bfloat16() for key, part in stored.items() if key.endswith("weight_scale")}
    save_file(stored, file, {"format": "pt"})
    counted = {}
    for device, asked in (("cpu", "auto"), ("cuda", "auto"), ("cuda", "dynamic"), ("cuda", "off")):
        with cpu_as_gpu() if device == "cuda" else nullcontext():
            model = load_model(
                path, communicator=Communicator(), dtype="bfloat16", device="cpu", activation_quantization=asked
            )
        planned = Sizing.of(PlanSettings(model=str(path), dtype="bfloat16", device=device))  # type: ignore[arg-type]
        assert planned.weight_bytes == model.spec.weight_bytes
        counted[device] = planned.weight_bytes
        if device == "cuda":
            linears = model._body.linears()
            scales = {linear.codes.scales.dtype for linear in linears if linear.codes is not None}
            has_groups = kind.endswith(("block", "g32"))
            assert scales == {torch.bfloat16 if has_groups else torch.float32}
    assert (counted["cuda"] > counted["cpu"]) == (not has_groups)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "fp8"])
def test_bytes_of_weights_quantised_at_load_are_those_loaded(quantization: str, source: Path) -> None:
    """With --quantization, too."""
    model = load_model(source, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization=quantization)
    settings = PlanSettings(model=str(source), dtype="bfloat16", device="cpu", quantization=quantization)  # type: ignore[arg-type]
    assert Sizing.of(settings).weight_bytes == model.spec.weight_bytes


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "deepseek-v3", "lfm2-moe", "nemotron-h"])
def test_experts_are_quantised_at_load(kind: str, tmp_path: Path) -> None:
    """Experts are quantised with the linears, in the plan and on the rank. Those of nemotron_h stay plain on both."""
    path = tiny_checkpoint(kind, tmp_path)
    model = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization="int8")
    settings = PlanSettings(model=str(path), dtype="bfloat16", device="cpu", quantization="int8")
    assert Sizing.of(settings).weight_bytes == model.spec.weight_bytes < 2 * model.spec.num_weights


@pytest.mark.parametrize("kind", ["aria_text", "jetmoe", "minimax_m3_vl_text"])
def test_experts_in_other_layouts_are_counted_as_held(kind: str, tmp_path: Path) -> None:
    """Those of aria_text and jetmoe stay plain, those of minimax_m3_vl_text are quantised, in the plan and on the
    rank."""
    sizes: dict[str, Any] = dict(moe_num_experts=4) if kind == "aria_text" else dict(num_local_experts=4)
    path = write(kind, tmp_path, **sizes)
    model = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization="int8")
    settings = PlanSettings(model=str(path), dtype="bfloat16", device="cpu", quantization="int8")
    assert Sizing.of(settings).weight_bytes == model.spec.weight_bytes
    experts = sum(part.nbytes for layer in model._body.experts() for parts in layer.parts for part in parts)
    count = sum(3 * layer.count * layer.hidden * layer.inner for layer in model._body.experts())
    assert (experts < 2 * count) == (kind == "minimax_m3_vl_text")


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3.5-moe"])
def test_gated_delta_nets_are_counted_as_held(kind: str, quantization: str, tmp_path: Path) -> None:
    """The projections to decays stay plain, and A_log is float32, in the plan and on the rank."""
    path = tiny_checkpoint(kind, tmp_path)
    model = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization=quantization)
    settings = PlanSettings(model=str(path), dtype="bfloat16", device="cpu", quantization=quantization)  # type: ignore[arg-type]
    assert Sizing.of(settings).weight_bytes == model.spec.weight_bytes


def test_latent_attention_keeps_its_projections_plain(tmp_path: Path) -> None:
    """With latent attention only the output projections and MLPs are quantised, in the plan and on the rank."""
    path = tiny_checkpoint("deepseek-v3", tmp_path, first_k_dense_replace=9)
    model = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization="int8")
    settings = PlanSettings(model=str(path), dtype="bfloat16", device="cpu", quantization="int8")
    assert Sizing.of(settings).weight_bytes == model.spec.weight_bytes < 2 * model.spec.num_weights
