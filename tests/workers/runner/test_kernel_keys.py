"""The warm-up launches every kernel variant that serving can launch, so that none is compiled later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from safetensors.torch import load_file, save_file

from coatcheck.kernels.compile_watch import CompileWatch
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.lora.adapter_files import write_adapter
from tests.workers.quantised_checkpoints import FORMATS, Weights
from tests.workers.ranks import run_ranks
from tests.workers.runner.recorded_keys import ClaimedGpu, record


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype"),
    [
        ("llama", "bfloat16", "auto"),
        ("gemma2", "float16", "int4"),
        ("qwen3-moe", "bfloat16", "auto"),
        ("qwen3-moe as awq", "float16", "auto"),
        ("deepseek-v3", "bfloat16", "fp8"),
        ("deepseek-v3 as deterministic", "bfloat16", "auto"),
        pytest.param("qwen3", "bfloat16", "fp8", marks=pytest.mark.full),
        pytest.param("olmo2", "float32", "int8", marks=pytest.mark.full),  # transformers' own modules, without graphs
    ],
)
def test_no_plan_asks_for_a_kernel_that_was_not_warmed(
    checkpoint_directory: Path, tmp_path: Path, arch: str, dtype: str, kv_dtype: str
) -> None:
    """Random steps of chunks, decodes, samplings and copies launch only kernels with a key of the warm-up, also where
    the experts of one layer are plain and those of the other quantised, and with --deterministic."""
    family, _, quantised = arch.partition(" as ")
    is_deterministic = quantised == "deterministic"
    if is_deterministic:
        # So wide that the depth of its linears has two units.
        path = tiny_checkpoint(family, tmp_path, kv_lora_rank=32, qk_rope_head_dim=16, hidden_size=1024)
        quantised = ""
    elif quantised:
        path = tmp_path / quantised
        plain = FORMATS[quantised](tiny_checkpoint(family, tmp_path, moe_intermediate_size=64), path)
        _restore_experts(path / "model.safetensors", "model.layers.0.mlp.experts.", plain)
    else:
        path = tiny_checkpoint(family, checkpoint_directory)
    ((warmed, served),) = run_ranks(1, record, (path, dtype, kv_dtype, is_deterministic))
    assert served <= warmed, served - warmed
    attention = "_latent_tiles" if family.startswith("deepseek") else "_tiles"
    asked = {attention, "_merge", "_draw", "_filter_floor", "_count_tokens", "_penalise", "_copy_blocks", "_token_mask"}
    if is_deterministic:
        asked |= {"_invariant_linear", "_add_units"}
    assert {key.split()[0] for key in warmed} >= asked and served
    for kernel in ("_quantised_linear", "_quantised_gate_up", "_quantised_down"):
        assert any(key.startswith(kernel) for key in served) == bool(quantised)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_steps_with_adapters_launch_warmed_kernels(tmp_path: Path, dtype: str) -> None:
    """Adapters of different ranks, in linears with one unit of columns and with two, of few rows and of many."""
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2, hidden_size=1024)
    write_adapter(path, tmp_path / "adapter a", seed=1, rank=5)
    write_adapter(path, tmp_path / "adapter b", seed=2, rank=33, linears=("q_proj", "v_proj", "down_proj"))
    ((warmed, served),) = run_ranks(1, record, (path, dtype, "auto", False))
    assert served <= warmed, served - warmed
    assert {key.split()[0] for key in served} >= {"_shrink", "_expand"}


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_gather_latents_warmed_every_kernel(tp: int, checkpoint_directory: Path) -> None:
    """With --mla-shard tokens the warm-up covers steps that gather latents and steps that exchange queries."""
    path = tiny_checkpoint("deepseek-v3", checkpoint_directory)
    for warmed, served in run_ranks(tp, record, (path, "bfloat16", "fp8", False)):
        assert served <= warmed, served - warmed
        attention = [key for key in served if key.startswith("_latent_tiles")]
        # Latents of the pool are FP8, gathered ones of the model's dtype.
        assert len({"'*u8'" in key for key in attention}) == 2


def _restore_experts(file: Path, prefix: str, plain: Weights) -> None:
    """Replace the quantised weights below `prefix` by plain ones."""
    stored = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(prefix)}
    stored |= {name: tensor.contiguous() for name, tensor in plain.items() if name.startswith(prefix)}
    save_file(stored, file, {"format": "pt"})


def test_a_late_compilation_is_counted() -> None:
    """Kernels compiled before `mark_ready` are not counted. A kernel compiled after that is counted, with its name."""
    from coatcheck.kernels.sampling.token_mask import _token_mask

    watch = CompileWatch()
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.runtime.driver.set_active(ClaimedGpu())
    try:
        watch.start()
        arguments = (torch.zeros(2, 64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32), 64, 2)
        for vocab in (64, 128, 48):
            _token_mask.warmup(*arguments, vocab, BLOCK=64, enable_fp_fusion=True, grid=(1, 1))
        assert (len(watch.kernels), watch.num_late()) == (1, 0)  # 48 is a multiple of 16 as the others are
        watch.mark_ready()
        _token_mask.warmup(*arguments, 48, BLOCK=64, enable_fp_fusion=True, grid=(1, 1))
        assert watch.num_late() == 0
        _token_mask.warmup(*arguments, 48, BLOCK=128, enable_fp_fusion=True, grid=(1, 1))
        assert watch.num_late() == 1 and watch.kernels[-1].startswith("_token_mask")
    finally:
        triton.runtime.driver.set_active(None)
        triton.knobs.runtime.jit_post_compile_hook = hook
