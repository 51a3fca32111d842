"""Decode steps padded to a captured size: which steps are padded, and that padding changes no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.runner.cuda_graphs import capture_sizes, pick_capture_size
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS
from tests.workers.runner.padded_steps import load, make_runner, padded_beside_plain, serve


@given(max_num_seqs=st.integers(1, 1000), count=st.integers(1, 300))
def test_sizes_cover_what_may_run(max_num_seqs: int, count: int) -> None:
    """Sizes ascend to max_num_seqs, 256 at most. At most half of the rows of a step are padding."""
    sizes = capture_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(max_num_seqs, 256)
    rows = [ScheduledSequence(slot, 5, 1, needs_sample=True) for slot in range(count)]
    size = pick_capture_size(rows, sizes)
    if count > sizes[-1]:
        assert size is None
    else:
        assert size is not None and count <= size <= max(1, 2 * count - 1)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([ScheduledSequence(0, 4, 1, needs_sample=True)], 2),
        ([ScheduledSequence(s, 9, 1, needs_sample=True) for s in range(3)], 4),
        ([ScheduledSequence(s, 9, 1, needs_sample=True) for s in range(5)], None),  # more than was captured
        (
            [ScheduledSequence(0, 4, 1, needs_sample=True), ScheduledSequence(1, 0, 3, needs_sample=True)],
            None,  # a prefill
        ),
        (
            [ScheduledSequence(0, 4, 1, needs_sample=True), ScheduledSequence(1, 3, 1, needs_sample=False)],
            None,
        ),  # the middle of a prompt
        ([], None),
    ],
)
def test_only_decodes_that_fit_take_a_graph(rows: list[ScheduledSequence], size: int | None) -> None:
    """A step takes the smallest size that holds its rows, if all rows decode."""
    assert pick_capture_size(rows, (2, 4)) == size


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype"),
    [("llama", "float32", "auto"), ("llama", "bfloat16", "int8"), ("qwen3", "bfloat16", "auto"),
     ("gemma2", "float32", "fp8"), ("olmo2", "float32", "auto")],
)  # fmt: skip
def test_padding_changes_no_token_and_no_byte(checkpoint_directory: Path, arch: str, dtype: str, kv_dtype: str) -> None:
    """Padded steps sample the same tokens, and leave the same bytes in the pool."""
    model = load(tiny_checkpoint(arch, checkpoint_directory), dtype)
    want, have, plain, padded, sizes = padded_beside_plain(model, kv_dtype)
    assert have == want
    assert torch.equal(plain, padded)
    assert {2, 4, 8} >= set(sizes) and len(set(sizes)) > 1, "nothing was padded: this proves nothing"


def test_graphs_are_not_used_before_they_are_captured(checkpoint_directory: Path) -> None:
    """A runner with capture sizes runs without graphs until they are captured."""
    runner = make_runner(load(tiny_checkpoint("llama", checkpoint_directory)), (2, 8))
    assert serve(runner)[1] == []


def test_a_closed_runner_holds_no_graph(checkpoint_directory: Path) -> None:
    """NCCL ends only after the graphs that were captured with it, so `close` frees them; steps go on without."""
    runner = make_runner(load(tiny_checkpoint("llama", checkpoint_directory)), (2, 8))
    runner.graphs.capture()
    graphs = [weakref.ref(replay) for replay in runner.graphs._replays.values()]
    tokens, sizes = serve(runner)
    assert any(sizes) and len(graphs) == 2
    runner.close()
    assert not any(graph() for graph in graphs)
    assert serve(runner) == (tokens, [])


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If capturing fails, one line says why, and steps sample the same tokens without graphs."""
    model = load(tiny_checkpoint("llama", checkpoint_directory))
    runner = make_runner(model, (2, 8))
    error = RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(runner.graphs, "_forward", Mock(side_effect=error))
    runner.graphs.capture()
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs, so each decode step launches every kernel: LlamaForCausalLM "
        "(operation not permitted when stream is capturing)"
    ]
    runner.pool.fill_(255)
    assert serve(runner) == serve(make_runner(model, ()))


@pytest.mark.full  # test_simulated_gpu.py runs the Triton kernels and the graphs of one model in `make test`
@pytest.mark.parametrize(
    ("arch", "kv_dtype", "quantised"),
    [("llama", "auto", ""), ("qwen3", "int8", ""), ("llama", "auto", "gptq-act-order"), ("qwen3-moe", "auto", "awq")],
)
def test_a_model_through_the_interpreted_kernels(tmp_path: Path, arch: str, kv_dtype: str, quantised: str) -> None:
    """With the Triton kernels in the interpreter, plain and padded steps sample the tokens of the CPU path."""
    sizes: dict[str, Any] = dict(moe_intermediate_size=64) if arch == "qwen3-moe" else {}
    path = tiny_checkpoint(arch, tmp_path, num_hidden_layers=1, **sizes)
    if quantised:
        FORMATS[quantised](path, tmp_path / quantised)
        path = tmp_path / quantised
    want = padded_beside_plain(load(path), kv_dtype, short=True)[0]
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.runner.padded_steps", str(path), kv_dtype, json.dumps(want)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("agreed\n")
