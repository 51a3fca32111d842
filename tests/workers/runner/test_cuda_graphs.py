"""Steps padded to a captured shape: which steps are padded, and that padding changes no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.graph_shapes import GraphSizes, capture_sizes, limit_graphs, pick_shape
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS
from tests.workers.ranks import run_ranks
from tests.workers.runner.padded_steps import load, make_runner, padded_beside_plain, serve


def row(num_tokens: int, start: int = 9, *, needs_sample: bool = True) -> ScheduledSequence:
    return ScheduledSequence(0, start, num_tokens, needs_sample)


@given(
    max_num_seqs=st.integers(1, 1000), budget=st.integers(1, 9000), largest=st.integers(0, 2048),
    count=st.integers(1, 2100),
)  # fmt: skip
def test_sizes_cover_what_may_run(max_num_seqs: int, budget: int, largest: int, count: int) -> None:
    """Sizes ascend to what a step may have, `largest` at most, and 512 decodes at most. At most half of a step of
    decodes is padding; of a step with more than 192 tokens a fourth."""
    sizes = capture_sizes(max_num_seqs, budget, largest)
    decodes, chunks = min(max_num_seqs, budget, largest, 512), min(budget, largest)
    for kind, most in ((sizes.decodes, decodes), (sizes.chunks, chunks)):
        assert list(kind) == sorted(set(kind)) and (kind[-1:] == (most,) if most else not kind)
        taken = next((size for size in kind if size >= count), None)
        if count > most:
            assert taken is None
        else:
            assert taken is not None and count <= taken <= (count * 1.34 if count > 192 else max(8, 2 * count - 1))


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([row(1)], (2, True, False)),
        ([row(1)] * 3, (4, True, False)),
        ([row(1)] * 5, None),  # more decodes than were captured
        ([row(1), row(4)], None),  # short tiles alone, and too many tokens
        ([row(1), row(2), row(1, needs_sample=False)], (4, True, False)),
        ([row(5)], (8, False, True)),
        ([row(7), row(6)], (16, False, True)),
        ([row(1), row(7)], (8, True, True)),
        ([row(3, 0), row(8, needs_sample=False)], (16, True, True)),
        ([row(17)], None),
        ([], None),
    ],
)
def test_a_step_takes_the_smallest_shape_of_its_kind(
    rows: list[ScheduledSequence], shape: tuple[int, bool, bool] | None
) -> None:
    """Rows of at most 4 tokens have short tiles and others wide ones: no shape launches tiles that no row has."""
    shapes = GraphSizes((2, 4), (8, 16)).shapes((4, 4))
    assert len(shapes) == 6
    assert pick_shape(rows, shapes, (4, 4)) == shape


@pytest.mark.parametrize(
    ("wanted", "max_blocks", "divides_tokens", "largest"),
    [
        (2048, 8192, False, 2048),  # 131,072 tokens in blocks of 16: 64 MiB
        (2048, 16384, False, 1024),
        (2048, 1 << 16, False, 512),
        (2048, 8192, True, 512),
        (256, 1 << 16, True, 256),
        (0, 1, False, 0),
    ],
)
def test_large_graphs_are_limited(wanted: int, max_blocks: int, divides_tokens: bool, largest: int) -> None:
    """Long block tables and ranks that divide tokens limit the largest graph to no less than 512 tokens."""
    assert limit_graphs(wanted, max_blocks=max_blocks, divides_tokens=divides_tokens) == largest


def test_a_row_with_short_tiles_in_some_layers_takes_a_shape_with_both() -> None:
    """Layers with 2 and layers with 8 queries in short tiles: a row of 5 tokens has short ones in some layers only."""
    shapes = GraphSizes((8,), (8,)).shapes((2, 8))
    assert [pick_shape([row(count)], shapes, (2, 8)) for count in (2, 5)] == [(8, True, False), (8, True, True)]


def test_without_short_tiles_a_shape_is_its_number_of_tokens() -> None:
    """In batch-invariant mode decodes and chunks have the same tiles, so they share their graphs."""
    shapes = GraphSizes((2, 4), (4, 16)).shapes((0, 0))
    assert [shape.num_tokens for shape in shapes] == [2, 4, 16]
    assert pick_shape([row(1), row(6)], shapes, (0, 0)) == shapes[2]


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype"),
    [("llama", "float32", "auto"), ("llama", "bfloat16", "int8"), ("qwen3", "bfloat16", "auto"),
     ("gemma2", "float32", "fp8"), ("olmo2", "float32", "auto")],
)  # fmt: skip
def test_padding_changes_no_token_and_no_byte(checkpoint_directory: Path, arch: str, dtype: str, kv_dtype: str) -> None:
    """Padded steps sample the same tokens, and leave the same bytes in the pool."""
    model = load(tiny_checkpoint(arch, checkpoint_directory), dtype)
    want, have, plain, padded, shapes = padded_beside_plain(model, kv_dtype)
    assert have == want
    assert torch.equal(plain, padded)
    taken = {shape.num_tokens for shape in shapes if shape is not None}
    assert {2, 4, 6, 8, 12} >= taken >= {12} and len(taken) > 2, "nothing was padded: this proves nothing"


def test_graphs_are_not_used_before_they_are_captured(checkpoint_directory: Path) -> None:
    """A runner with capture sizes runs without graphs until they are captured."""
    runner = make_runner(load(tiny_checkpoint("llama", checkpoint_directory)), GraphSizes((2, 8), (12,)))
    assert serve(runner)[1] == []


def test_a_step_that_samples_more_rows_than_were_captured_has_no_graph(checkpoint_directory: Path) -> None:
    """Graphs of chunks hold more tokens than the graphs of the sampler hold rows."""
    graphs = make_runner(load(tiny_checkpoint("llama", checkpoint_directory)), GraphSizes((2,), (16,))).graphs
    graphs.capture()
    rows = [row(2), row(1), row(9, needs_sample=False)]
    assert graphs.pick_shape(rows) in graphs.shapes
    assert graphs.pick_shape([*rows, row(1)]) is None


def test_a_closed_runner_holds_no_graph(checkpoint_directory: Path) -> None:
    """NCCL ends only after the graphs that were captured with it, so `close` frees them; steps go on without. The
    capture says how many graphs it has."""
    runner = make_runner(load(tiny_checkpoint("llama", checkpoint_directory)), GraphSizes((2, 8), (12,)))
    progress = Mock()
    runner.graphs.capture(progress)
    assert [call.args for call in progress.call_args_list] == [(done, 11) for done in (1, 2, 3, 7, 11)]
    graphs = [weakref.ref(replay) for replay in runner.graphs._forwards.values()]
    tokens, sizes = serve(runner)
    assert any(sizes) and len(graphs) == 3
    runner.close()
    assert not any(graph() for graph in graphs)
    assert serve(runner) == (tokens, [])


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If capturing fails, one line says why, and steps sample the same tokens without graphs."""
    model = load(tiny_checkpoint("llama", checkpoint_directory))
    runner = make_runner(model, GraphSizes((2, 8), (12,)))
    error = RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(runner.graphs, "_forward", Mock(side_effect=error))
    runner.graphs.capture()
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs, so each step launches every kernel: LlamaForCausalLM "
        "(operation not permitted when stream is capturing)"
    ]
    runner.pool.fill_(255)
    assert serve(runner) == serve(make_runner(model, GraphSizes()))


def captures_where_rank_1_fails(communicator: Communicator, path: str) -> list[str]:
    """What ends captures on this rank, each after all collectives of the call that fails on rank 1."""
    model = load_model(Path(path), communicator=communicator, dtype="float32", device="cpu")
    found = []
    for kind in (RuntimeError, torch.OutOfMemoryError, TypeError, ValueError):
        graphs = make_runner(model, GraphSizes((2,), (4,)), communicator=communicator).graphs
        with patch.object(graphs, "_forward", partial(_run_and_fail, graphs._forward, communicator.rank, kind)):
            try:
                graphs.capture()
                found.append("no graphs")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        assert not graphs._forwards
    return found


def _run_and_fail(forward: Callable[[StepShape], None], rank: int, kind: type[Exception], shape: StepShape) -> None:
    """ValueError stands for a RuntimeError on both ranks."""
    forward(shape)
    if kind is ValueError:
        raise RuntimeError("it failed")
    if rank == 1:
        raise kind("it failed\nand more")


def test_ranks_agree_that_a_call_failed(checkpoint_directory: Path) -> None:
    """A call that fails on one rank alone, or for want of memory, ends all ranks at once: the other rank says which and
    why. One that fails on every rank leaves all of them without graphs."""
    path = str(tiny_checkpoint("llama", checkpoint_directory, num_attention_heads=4))
    waiting, failed = run_ranks(2, captures_where_rank_1_fails, path)
    ended = "PeerLost: rank 1 failed while CUDA graphs were captured (it failed); see its log"
    assert waiting == [ended, ended, ended, "no graphs"]
    names = ("RuntimeError", "OutOfMemoryError", "TypeError")
    assert failed == [*(f"{name}: it failed\nand more" for name in names), "no graphs"]


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
        timeout=MAX_PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("agreed\n")
