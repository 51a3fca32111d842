"""Models with quantised activations (W8A8) by Triton's kernels, beside transformers with activations quantised alike.

Triton's interpreter runs in a process of its own, which is this module again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.kernels.triton.mended_interpreter import reduce_work
from tests.workers.checkpoint.rounded_activations import round_inputs
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS, Write, fp8_blocks, written

_BLOCKS: Write = written(fp8_blocks(32, 32), quant_method="fp8", weight_block_size=[32, 32])
_FP8_BLOCKS = RowFormat(CodeKind.FP8, 32), "fp8 activations for each 32 columns"
# Architecture, how a checkpoint is written, its activations, and how status describes them.
_CASES: dict[str, tuple[str, Write, RowFormat, str]] = {
    "fp8-channel": (
        "llama", FORMATS["compressed-fp8-channel"], RowFormat(CodeKind.FP8, 0), "fp8 activations for each token"
    ),
    "fp8-block": ("llama", _BLOCKS, *_FP8_BLOCKS),
    "int8": ("llama", FORMATS["compressed-w8a8-int"], RowFormat(CodeKind.INT8, 0), "int8 activations for each token"),
    "experts": ("qwen3-moe", _BLOCKS, *_FP8_BLOCKS),
    "shared expert": ("deepseek-v3", _BLOCKS, *_FP8_BLOCKS),
}  # fmt: skip
_SIZES: dict[str, dict[str, Any]] = {"qwen3-moe": dict(moe_intermediate_size=64), "deepseek-v3": dict(q_lora_rank=32)}
_PROMPT = [3 + 7 * place % 190 for place in range(30)]
_TOKENS = 8
_BOUND = 1e-4  # of logits of about 8


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By case what the process says that compares all of them; its imports take half as long as a case."""
    paths: list[str] = []
    for name, (architecture, write, *_) in _CASES.items():
        folder = tmp_path_factory.mktemp("case")
        source = tiny_checkpoint(architecture, folder, num_hidden_layers=2, **_SIZES.get(architecture, {}))
        plain = write(source, folder / "quantised")
        shutil.copytree(source, folder / "plain")
        save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
        paths += [name, str(folder / "quantised"), str(folder / "plain")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.model.test_w8a8_models", *paths],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("name", _CASES)
def test_tokens_are_those_of_transformers_with_quantised_activations(name: str, outcomes: dict[str, str]) -> None:
    """The kernels of norm, activation and linears give the logits and greedy tokens of the float32 model of dequantised
    weights whose linears and experts round their input to the same codes. With activation_quantization off no input is
    rounded."""
    assert outcomes[name] == "agreed"


def compare_all(arguments: list[str]) -> None:
    """Print a JSON object: case -> "agreed" or the traceback."""
    outcomes = {}
    for name, path, plain in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        with patch.object(F, "linear", F.linear):  # compare replaces F.linear
            try:
                compare(name, Path(path), Path(plain))
                outcomes[name] = "agreed"
            except Exception:
                outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


def compare(name: str, path: Path, plain: Path) -> None:
    _, _, format, description = _CASES[name]
    ours = _driver(path, "auto")
    assert ours.model.describe_activations() == description
    logits, without = _our_logits(ours), _our_logits(_driver(path, "off"))
    tokens = ours.greedy([_PROMPT], _TOKENS, chunk=16)
    theirs: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    exact = _logits(theirs)
    round_inputs(theirs, format)
    rounded = _logits(theirs)
    error, error_off, effect = (
        float((one - other).abs().max()) for one, other in ((logits, rounded), (without, exact), (exact, rounded))
    )
    # A sum in another order may move a number over the middle between two codes: one step among thousands of others.
    assert error < effect / 10 and error_off < _BOUND < effect, (error, error_off, effect)
    want: list[int] = []
    for _ in range(_TOKENS):
        want.append(int(theirs(torch.tensor([[*_PROMPT, *want]])).logits[0, -1].argmax()))
    assert tokens == [want]


def _driver(path: Path, setting: str) -> PagedDriver:
    model = load_model(
        path, communicator=Communicator(), dtype="float32", device="cpu", activation_quantization=setting
    )
    return PagedDriver(model)


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([_PROMPT])).logits[0, -1]
        return logits


def _our_logits(driver: PagedDriver) -> torch.Tensor:
    sequence = driver.add_sequence(_PROMPT, 1)
    return driver.step([(sequence, len(_PROMPT))])[0]


if __name__ == "__main__":
    reduce_work()
    compare_all(sys.argv[1:])
