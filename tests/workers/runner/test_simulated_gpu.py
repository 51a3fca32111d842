"""A rank on a simulated GPU: it synchronises where a GPU needs it, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from coatcheck.workers.core.group_config import GroupConfig
from tests.simulated_gpu.simulated_run import make, serve
from tests.workers.checkpoints import ARCHITECTURES, ONE_RANK, tiny_checkpoint
from tests.workers.model.architectures import SERVED, write
from tests.workers.quantised_checkpoints import FORMATS
from tests.workers.rank_client import generate
from tests.workers.rank_group import RankGroup
from tests.workers.ranks import free_address

full = pytest.mark.full
_DELTA_NET_AND_ATTENTION = ["linear_attention", "full_attention"]
# In float32 torch's product of nemotron_h's experts waits for the device.
_WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "nemotron-h": dict(layers_block_type=["linear_attention", "mlp", "full_attention"] * 2)
}
# --deterministic refuses experts whose router is transformers' code.
_DETERMINISTIC: dict[str, dict[str, Any]] = {
    "bamba": {}, "falcon-h1": {}, "falcon-h1-no-norm": {}, "granite-hybrid": dict(num_local_experts=0), "lfm2": {},
    **_WITHOUT_EXPERTS,
}  # fmt: skip

# Imports as a rank does, which saves a third of the time of the imports, then runs the module.
_RUN = (
    "import runpy, sys; from coatcheck.workers.host.fast_imports import import_transformers; import_transformers(); "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "more"),
    [
        ("gemma2", "int8", "forget"),
        pytest.param("llama", "auto", "forget", marks=full),
        pytest.param("qwen3", "fp8", "deterministic", marks=full),
        pytest.param("granite", "auto", "", marks=full),  # transformers' own modules
        pytest.param("mixtral", "auto", "", marks=full),
        pytest.param("deepseek-v3", "auto", "", marks=full),
        pytest.param("deepseek-v2", "fp8", "deterministic", marks=full),
    ],
)
def test_a_rank_keeps_to_what_a_gpu_needs(tmp_path: Path, arch: str, kv_dtype: str, more: str) -> None:
    """With Triton's kernels, graphs, transfers and the copier's stream a model gives the tokens of the CPU path.

    The host waits only for tokens, and streams wait for each other. A run without one of these waits fails.
    """
    path = tiny_checkpoint(arch, tmp_path, num_hidden_layers=2, num_attention_heads=4)
    runner = make(path, torch.device("cpu"), kv_dtype, deterministic=more == "deterministic")
    want, restored = serve(runner)
    assert restored > 0
    assert simulated("simulated_run", str(path), kv_dtype, json.dumps(want), more)[-1] == "agreed"


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        pytest.param("qwen3-next", "", marks=full),
        pytest.param("qwen3.5", "deterministic", marks=full),
        *(pytest.param(arch, "", marks=() if arch == "falcon-h1-no-norm" else full) for arch in ONE_RANK),
    ],
)
def test_a_hybrid_model_on_a_gpu(tmp_path: Path, arch: str, more: str) -> None:
    """With Triton's kernels and graphs, whose padding has no state, layers with a state give the CPU path's tokens."""
    path = tiny_checkpoint(arch, tmp_path, **_WITHOUT_EXPERTS.get(arch, {}))
    want, _ = serve(make(path, torch.device("cpu"), "auto", deterministic=more == "deterministic"))
    assert simulated("simulated_run", str(path), "auto", json.dumps(want), "states", more)[-1] == "agreed"


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=() if arch == "lfm2" else full) for arch in _DETERMINISTIC])
def test_a_hybrid_model_has_the_same_bits_in_every_way(tmp_path: Path, arch: str) -> None:
    """With --deterministic on a GPU a request has the same tokens and bits of log-probabilities alone, beside others
    and in chunks, also in models whose norms are transformers' modules."""
    path = tiny_checkpoint(arch, tmp_path, **_DETERMINISTIC[arch])
    assert simulated("simulated_load", "bits", str(path)) == [str(path)]


@full
def test_a_rank_from_start_to_end(tmp_path: Path) -> None:
    """A rank warms up, captures graphs, serves over gRPC and ends. No kernel is compiled late.

    A request that is repeated after its blocks were demoted to the host gets the same answer.
    """
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2)
    settings = dict(kv_memory=1 << 20, dtype="float32", device="cpu", threads=1)
    group = RankGroup(GroupConfig("g", str(path), "tiny", **settings))  # type: ignore[arg-type]
    try:
        want = generate(group.wait_ready(), list(range(3, 23)), 3)
    finally:
        group.kill()
    assert simulated("simulated_rank", str(path))[-1] == " ".join(map(str, want))


@pytest.mark.parametrize(
    ("has_peer_memory", "rounds", "more"),
    [
        pytest.param(False, 3, "", marks=full),
        (True, 1, ""),
        pytest.param(True, 3, "graphs", marks=full),
        (True, 1, "failed-capture"),
    ],
)
def test_two_ranks_of_one_gpu(tmp_path: Path, has_peer_memory: bool, rounds: int, more: str) -> None:
    """Two ranks, each with half of the heads and a host tier, give the tokens of one rank.

    With peer memory the all-reduces before a norm are one kernel with it, and CUDA graphs can contain them. If one rank
    cannot capture a graph, neither has graphs, and rank 0 says why.
    """
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2)
    want, _ = serve(make(path, torch.device("cpu"), "auto"), None, rounds)
    folder = str(tmp_path) if has_peer_memory else ""
    said, _ = two_ranks(str(path), folder, str(rounds), *more.split())
    assert json.loads(said[-1]) == want


@full
def test_two_ranks_of_a_hybrid_model(tmp_path: Path) -> None:
    """Two ranks, each with half of the heads of the gated delta nets and their states, give the tokens of one rank."""
    path = tiny_checkpoint("qwen3.5", tmp_path, num_hidden_layers=2, layer_types=_DELTA_NET_AND_ATTENTION)
    want, _ = serve(make(path, torch.device("cpu"), "auto"), None, 1)
    said, _ = two_ranks(str(path), "", "1")
    assert json.loads(said[-1]) == want


def test_a_rank_that_fails_before_a_capture_ends_the_group(tmp_path: Path) -> None:
    """Rank 1 fails in a call that rank 0 waits for in a collective. Rank 1 ends with its own error, and rank 0 ends
    too, instead of waiting."""
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    waiting, failed = two_ranks(str(path), str(tmp_path), "1", "failed-call")
    assert failed[-1] == "RuntimeError: the kernel failed"
    assert "Error" in waiting[-1] or "PeerLost" in waiting[-1]


def two_ranks(*words: str) -> list[list[str]]:
    """The lines that each of two ranks prints."""
    address = free_address()
    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(simulated, "simulated_ranks", str(rank), address, *words) for rank in range(2)]
        return [rank.result() for rank in both]


def test_a_step_with_graphs_is_three_replays(tmp_path: Path) -> None:
    """With graphs a step of any kind launches as much as a step of decodes, however many layers there are and whatever
    sampling the requests ask for. Steps of prompts alone and of decodes alone launch one attention kernel in each
    layer."""
    layers = 2
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=layers)
    for line in simulated("simulated_launches", str(path))[-2:]:
        found = json.loads(line)
        assert {kind: attention for kind, (_, _, attention) in found.items()} == {
            "two decodes": layers,
            "a prompt": layers,
            "a decode and a prompt": 2 * layers,
        }
        for graphs, plain, _ in found.values():
            assert graphs == {"replay": 3, "copy": 2}
            assert plain["kernel"] > 5 * layers and plain["operator"] > 20


def test_the_pool_takes_what_the_largest_step_leaves(tmp_path: Path) -> None:
    """Pool, weights and the measured step fill --gpu-memory-utilization of the GPU; serving takes no more memory."""
    path = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    assert simulated("simulated_memory", str(path)) == ["agreed"]


# Modules of transformers that wait for the device, or copy from the host, in a forward pass as transformers has it.
_WAITING = {
    **{name: SERVED[name] for name in ("falcon", "gpt2", "gemma3n_text", "phimoe")},
    "falcon-multi-query": dict(multi_query=True, new_decoder_architecture=False),
    "falcon-multi-head": dict(multi_query=False, new_decoder_architecture=False),
    "aria_text": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=16),
    "minimax_m3_vl_text": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
}


@pytest.mark.parametrize(
    "names",
    [
        ("falcon-multi-query", "gemma3n_text", "jetmoe"),
        pytest.param(tuple(_WAITING), marks=full),
    ],
)
def test_modules_of_transformers_that_waited_can_be_captured(names: tuple[str, ...], tmp_path: Path) -> None:
    """Their steps run as CUDA graphs, and give the tokens of the CPU path."""
    wanted = {}
    for name in names:
        path = write(name.partition("-")[0], tmp_path / name, **_WAITING[name])
        wanted[str(path)] = serve(make(path, torch.device("cpu"), "auto"), rounds=1)[0]
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    assert simulated("simulated_load", "capture", str(tmp_path / "wanted.json")) == list(wanted)


def test_every_family_loads_onto_a_gpu(checkpoint_directory: Path, tmp_path: Path) -> None:
    """No forward pass, also none of the probes, mixes tensors of the GPU with tensors of other devices."""
    paths = [str(tiny_checkpoint(arch, checkpoint_directory)) for arch in (*ARCHITECTURES, *ONE_RANK)]
    for name in ("awq", "gptq-act-order"):
        FORMATS[name](tiny_checkpoint("llama", checkpoint_directory), tmp_path / name)
        paths.append(str(tmp_path / name))
    assert len(simulated("simulated_load", *paths)) == len(paths)


def simulated(module: str, *arguments: str) -> list[str]:
    """The lines that `module` prints, run in a process where the simulated GPU replaces a real one."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, f"tests.simulated_gpu.{module}", *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()
