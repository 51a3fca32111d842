"""The part `quantised`: quantised checkpoints, weights quantised when they are loaded, and quantised activations."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind
from tests.gpu.comparison import EXACT, compare_paths, compare_rounded, mean_difference, serve_on
from tests.gpu.outcome import Skipped
from tests.gpu.served import PROMPTS_SCORED
from tests.workers.checkpoint.expert_checkpoints import write_pair
from tests.workers.checkpoint.rounded_activations import round_inputs
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import EXPERT_CASES, FORMATS, Write, codes_by_row, fp8_blocks, written

LIMIT = 150.0
_KINDS = ("int8", "int4", "fp8")
_LOADED = ("llama", "qwen3-moe")
_EXPERTS = (
    *(("gpt-oss", "mxfp4"), ("mixtral", "awq"), ("qwen3-moe", "fp8-by-row"), ("qwen3-moe", "packed-int4")),
    *(("qwen3-moe", "gptq"), ("qwen3-moe", "modelopt-nvfp4"), ("deepseek-v3", "fp8-block")),
    ("deepseek-v3", "int8-by-row"),
)
_BLOCKS = written(fp8_blocks(32, 32), quant_method="fp8", weight_block_size=[32, 32])
_FP8_ROWS = written(
    codes_by_row(torch.float8_e4m3fn), quant_method="compressed-tensors", format="float-quantized", config_groups={}
)
_INT8_ROWS = written(
    codes_by_row(torch.int8), quant_method="compressed-tensors", format="int-quantized", config_groups={}
)
# How a checkpoint is written, and the format of its activations.
_ACTIVATIONS: dict[str, tuple[Write, RowFormat]] = {
    "fp8-block": (_BLOCKS, RowFormat(CodeKind.FP8, 32)),
    "fp8-by-row": (_FP8_ROWS, RowFormat(CodeKind.FP8, 0)),
    "int8-by-row": (_INT8_ROWS, RowFormat(CodeKind.INT8, 0)),
}
_SIZES: dict[str, dict[str, Any]] = {"qwen3-moe": dict(moe_intermediate_size=64), "deepseek-v3": dict(q_lora_rank=32)}


def names(whole: bool) -> list[str]:
    """ "WAY FORMAT FAMILY": a checkpoint, its experts, quantised at load and also deterministic, and activations."""
    return [
        *(f"checkpoint {kind} llama" for kind in FORMATS),
        *(f"experts {kind} {family}" for family, kind in (EXPERT_CASES if whole else _EXPERTS)),
        *(f"{way} {kind} {family}" for way in ("load", "deterministic") for family in _LOADED for kind in _KINDS),
        *(f"activations {kind} {family}" for family in ("llama", *_SIZES) for kind in _ACTIVATIONS),
    ]


def run(name: str, device: torch.device, folder: Path) -> str:
    way, kind, family = name.split()
    if way == "activations":
        return _compare_activations(kind, family, device, folder)
    if way in ("load", "deterministic"):
        is_fixed = way == "deterministic"
        # Heads of 16 elements, which this mode needs on CPUs.
        heads: dict[str, Any] = dict(num_attention_heads=4) if is_fixed else {}
        path = tiny_checkpoint(family, folder, num_hidden_layers=2, **heads, **_SIZES.get(family, {}))
        settings: dict[str, Any] = dict(quantization=kind, deterministic=is_fixed)
    else:
        path = _write(way, kind, family, folder)
        settings = dict(activation_quantization="off")  # the CPU's path quantises none
    exact = compare_paths(path, device, EXACT, **settings)
    return f"{exact}; bfloat16: {compare_rounded(path, device, brief=True, **settings)}"


def _write(way: str, kind: str, family: str, folder: Path) -> Path:
    try:
        if way == "experts":
            return write_pair(family, kind, folder)[0]
        FORMATS[kind](tiny_checkpoint(family, folder, num_hidden_layers=2), folder / "quantised")
    except ModuleNotFoundError as error:
        raise Skipped(f"the checkpoint's writer needs {error.name}") from error
    return folder / "quantised"


def _compare_activations(kind: str, family: str, device: torch.device, folder: Path) -> str:
    """The GPU's log-probabilities are near those of transformers with inputs rounded to the same codes: nearer by far
    than those of exact inputs."""
    if device.type == "cpu":
        raise Skipped("only GPUs quantise activations")
    write, format = _ACTIVATIONS[kind]
    source = tiny_checkpoint(family, folder, num_hidden_layers=2, **_SIZES.get(family, {}))
    weights = write(source, folder / "quantised")
    shutil.copytree(source, folder / "plain")
    stored = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "plain" / "model.safetensors", {"format": "pt"})
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, experts_implementation="eager"
    )
    exact = _scores(theirs)
    with patch.object(F, "linear", F.linear):  # round_inputs replaces it
        round_inputs(theirs, format)
        rounded = _scores(theirs)
    have = serve_on(folder / "quantised", device, activation_quantization="dynamic").scores
    error, effect = mean_difference(have, rounded), mean_difference(exact, rounded)
    assert error < effect / 2, f"the mean difference is {error:.1e}; that of exact activations is {effect:.1e}"
    return f"mean difference {error:.1e}; that of exact activations {effect:.1e}"


def _scores(model: Any) -> list[float]:
    """Log-probabilities of the prompts' tokens, as Served.scores has them."""
    found: list[float] = []
    with torch.inference_mode():
        for prompt in PROMPTS_SCORED:
            tokens = torch.tensor(prompt)
            logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
            found += logprobs[:-1].gather(1, tokens[1:, None]).flatten().tolist()
    return found
