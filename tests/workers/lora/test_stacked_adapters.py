"""LoRA adapters as GPUs hold them: the engine's tokens equal those of transformers with the adapter merged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.lora.adapted_answers import COUNT, PROMPT
from tests.workers.lora.adapter_files import greedy, merged_model, write_adapter


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> dict[str, str]:
    """Name -> directory: an adapter of all linears, and one of two linears with a rank above its tile's height."""
    all_linears = write_adapter(base, tmp_path / "all", seed=1)
    few = write_adapter(base, tmp_path / "few", seed=2, rank=21, alpha=42.0, linears=("q_proj", "down_proj"))
    return {"all": str(all_linears), "few": str(few)}


@pytest.fixture
def expected(base: Path, adapters: dict[str, str]) -> dict[str, list[int]]:
    """transformers' greedy tokens, without an adapter and with each one merged."""
    paths = {"": None, **{name: Path(folder) for name, folder in adapters.items()}}
    found = {name: greedy(merged_model(base, path), PROMPT, COUNT) for name, path in paths.items()}
    assert len({tuple(tokens) for tokens in found.values()}) == 3, "the adapters change nothing: this proves nothing"
    return found


def test_each_row_has_its_adapter(base: Path, adapters: dict[str, str], expected: dict[str, list[int]]) -> None:
    """In padded steps on one rank, and in plain steps on two ranks that hold slices of the adapters."""
    interpreted("tests.workers.lora.adapted_answers", str(base), json.dumps(adapters), json.dumps(expected))


def test_graphs_add_adapters(base: Path, adapters: dict[str, str], expected: dict[str, list[int]]) -> None:
    """A graph that was captured once computes steps with any adapters and steps with none, and the host waits for
    nothing but tokens."""
    interpreted("tests.workers.lora.simulated_adapters", str(base), json.dumps(adapters), json.dumps(expected))


def interpreted(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("agreed\n")
