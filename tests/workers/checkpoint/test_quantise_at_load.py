"""`quantization`: a plain checkpoint whose linears are quantised when they are loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coatcheck.kernels.layers.quantised_weight import CodeKind, quantise
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS

KINDS = {"int8": CodeKind.INT8, "int4": CodeKind.INT4, "fp8": CodeKind.FP8}


@pytest.fixture(scope="module")
def source(checkpoint_directory: Path) -> Path:
    return tiny_checkpoint("llama", checkpoint_directory)


@pytest.mark.parametrize(("kind", "steps"), [(CodeKind.INT8, 127), (CodeKind.INT4, 8), (CodeKind.FP8, 16)])
def test_every_weight_is_next_to_its_code(kind: CodeKind, steps: int) -> None:
    """The error of a weight is at most half a step of its row or group; of e4m3 half a step of its exponent. The only
    larger ones are int4's, at the end of a group that lies opposite its largest number. Rows of zeros stay zero."""
    weight = torch.randn(30, 300)
    weight[3] = 0
    error = (quantise(weight, kind).dequantise() - weight).abs()
    if kind is CodeKind.FP8:
        bound = weight.abs() / steps + weight.abs().amax(1, keepdim=True) / 448 * 2**-9
    elif kind is CodeKind.INT8:
        bound = weight.abs().amax(1, keepdim=True) / (2 * steps)
    else:
        padded = torch.nn.functional.pad(weight, (0, 84)).view(30, 3, 128)
        bound = padded.abs().amax(2).repeat_interleave(128, 1)[:, :300] / steps
    # The scales of groups are rounded to bfloat16, by at most 1 / 512, and multiplied by codes up to 7.
    assert bool((error <= bound * (1 + 7 / 512 + 1e-5)).all())
    assert not error[3].any()


@pytest.mark.parametrize("quantization", KINDS)
def test_tokens_are_those_of_the_rounded_weights(quantization: str, source: Path, tmp_path: Path) -> None:
    """A model that is quantised at load gives the tokens of a checkpoint of its rounded weights, and holds the bytes of
    its codes and scales."""
    rounded, saved = {}, 0
    for name, weight in load_file(source / "model.safetensors").items():
        rounded[name] = weight
        if name.endswith("_proj.weight"):
            small = quantise(weight.float(), KINDS[quantization])
            rounded[name] = small.dequantise()
            saved += weight.numel() * 4 - small.nbytes
    plain = tmp_path / "rounded"
    plain.mkdir()
    for file in source.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    prompt = [3 + 7 * place % 190 for place in range(30)]

    def load(path: Path, setting: str) -> PagedDriver:
        return PagedDriver(
            load_model(path, communicator=Communicator(), dtype="float32", device="cpu", quantization=setting)
        )

    ours, theirs = load(source, quantization), load(plain, "auto")
    assert ours.greedy([prompt], 20, chunk=16) == theirs.greedy([prompt], 20, chunk=16)
    assert theirs.model.spec.weight_bytes - ours.model.spec.weight_bytes == saved
    assert ours.model.spec.num_weights == theirs.model.spec.num_weights
    assert ours.model.spec.fingerprint.endswith(f"-{quantization}")


def test_what_cannot_be_quantised_at_load_is_refused(source: Path, tmp_path: Path) -> None:
    """A quantised checkpoint, and a dtype that the C kernels do not compute, are refused with what to change."""
    quantised = tmp_path / "awq"
    FORMATS["awq"](source, quantised)
    for path, dtype, said in (
        (quantised, "float32", "is quantised with awq already; leave --quantization out"),
        (source, "float16", "needs bfloat16 or float32 and the native kernels"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            load_model(path, communicator=Communicator(), dtype=dtype, device="cpu", quantization="int8")
