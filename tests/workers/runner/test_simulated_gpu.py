"""A rank of a GPU on a simulated one: that it waits where a GPU needs it, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.workers.core.group_config import GroupConfig
from tests.simulated_gpu.simulated_run import make, serve
from tests.workers.checkpoints import ARCHITECTURES, tiny_checkpoint
from tests.workers.rank_client import generate
from tests.workers.rank_group import RankGroup
from tests.workers.ranks import free_address

full = pytest.mark.full


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "more"),
    [
        ("gemma2", "int8", "forget"),
        pytest.param("llama", "auto", "forget", marks=full),
        pytest.param("qwen3", "fp8", "deterministic", marks=full),
        pytest.param("granite", "auto", "", marks=full),  # transformers' own modules, without graphs
        pytest.param("mixtral", "auto", "", marks=full),
    ],
)
def test_a_rank_keeps_to_what_a_gpu_needs(tmp_path: Path, arch: str, kv_dtype: str, more: str) -> None:
    """Through Triton's kernels, graphs, transfers and the copier's stream a model says what it says on the CPU; the
    host waits for tokens alone, streams wait for each other, and a run that forgets one of these waits is found out."""
    path = tiny_checkpoint(arch, tmp_path, num_hidden_layers=2, num_attention_heads=4)
    runner = make(path, torch.device("cpu"), kv_dtype, deterministic=more == "deterministic")
    want, restored = serve(runner)
    assert restored > 0
    assert simulated("simulated_run", str(path), kv_dtype, json.dumps(want), more)[-1] == "agreed"


@full
def test_a_whole_life_of_a_rank(tmp_path: Path) -> None:
    """It warms, captures, serves over gRPC the same twice, though blocks went to the host meanwhile, and ends; no
    kernel is compiled late."""
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2)
    settings = dict(kv_memory=1 << 20, dtype="float32", device="cpu", threads=1)
    group = RankGroup(GroupConfig("g", str(path), "tiny", **settings))  # type: ignore[arg-type]
    try:
        want = generate(group.wait_ready(), list(range(3, 23)), 3)
    finally:
        group.kill()
    assert simulated("simulated_rank", str(path))[-1] == " ".join(map(str, want))


@full
def test_two_ranks_of_one_gpu(tmp_path: Path) -> None:
    """Each with half of the heads and of every block, a host tier too, they say what one rank says."""
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2)
    want, _ = serve(make(path, torch.device("cpu"), "auto"))
    address = free_address()
    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(simulated, "simulated_ranks", str(rank), address, str(path)) for rank in range(2)]
        assert json.loads(both[0].result()[-1]) == want
        both[1].result()


def test_every_family_loads_onto_a_gpu(checkpoint_directory: Path) -> None:
    """No pass of a model's code, of those that count shapes only either, mixes the GPU's tensors with others'."""
    paths = [str(tiny_checkpoint(arch, checkpoint_directory)) for arch in ARCHITECTURES]
    assert len(simulated("simulated_load", *paths)) == len(paths)


def simulated(module: str, *arguments: str) -> list[str]:
    """What it prints, in a process in which the simulated GPU can take the real one's place."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.simulated_gpu.{module}", *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()
