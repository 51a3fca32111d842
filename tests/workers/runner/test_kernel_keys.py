"""The warm-up launches every kernel variant that serving can launch, so that none is compiled later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from coatcheck.kernels.attention import paged_prefill
from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_90, GpuProperties
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.ranks import run_ranks
from tests.workers.runner.recorded_keys import ClaimedGpu, record


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype"),
    [
        ("llama", "bfloat16", "auto"),
        ("gemma2", "float16", "int4"),
        pytest.param("qwen3", "bfloat16", "fp8", marks=pytest.mark.full),
        pytest.param("olmo2", "float32", "int8", marks=pytest.mark.full),  # transformers' own modules, without graphs
    ],
)
def test_no_plan_asks_for_a_kernel_that_was_not_warmed(
    checkpoint_directory: Path, arch: str, dtype: str, kv_dtype: str
) -> None:
    """Random steps of chunks, decodes, samplings and copies launch only kernels with a key of the warm-up."""
    path = tiny_checkpoint(arch, checkpoint_directory)
    ((warmed, served),) = run_ranks(1, record, (path, dtype, kv_dtype))
    assert served <= warmed, served - warmed
    asked = {"_decode", "_reduce", "_prefill", "_draw", "_filter_floor", "_count_tokens", "_penalise", "_copy_blocks",
             "_token_mask"}  # fmt: skip
    assert {key.split()[0] for key in warmed} >= asked and served


@pytest.mark.parametrize("gpu", [SM_80, SM_90, GFX942])
@pytest.mark.parametrize("group", [1, 3, 8, 71])
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize(("quantised", "element_size"), [(False, 2), (True, 2), (False, 4)])
def test_chunk_lengths_take_every_launch(
    gpu: GpuProperties, group: int, dim: int, quantised: bool, element_size: int
) -> None:  # fmt: skip
    """Every chunk length has the launch parameters of one of the lengths of the warm-up."""
    pack = paged_prefill.pick_pack(group)
    launches = {
        length: paged_prefill.pick_launch(length * pack, dim, dim, element_size, quantised, gpu)
        for length in range(2, 400)
    }
    assert set(launches.values()) == {launches[length] for length in paged_prefill.chunk_lengths(group)}


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
