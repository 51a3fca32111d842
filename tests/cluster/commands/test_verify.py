"""`coatcheck verify` compares a small copy of a model with transformers, and says why a model is not served."""

import json
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.commands import verify
from tests.cluster.command_line import run_here
from tests.cluster.model_configs import LLAMA, write_config

_GPT_OSS: dict[str, Any] = LLAMA | dict(model_type="gpt_oss", num_local_experts=32, sliding_window=128, head_dim=64)


def test_a_model_without_weights_is_verified(tmp_path: Path) -> None:
    """config.json alone is enough, by its folder or its own path; the line names the model type and the cases."""
    write_config(tmp_path, _GPT_OSS, max_position_embeddings=4096)
    done = run_here("verify", str(tmp_path / "config.json"))
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path.name} (gpt_oss) equals transformers ")
    assert "computed in one step, in chunks, beside another sequence, on a cached prefix" in " ".join(done.out.split())


def test_a_model_that_is_not_served_exits_with_2(tmp_path: Path) -> None:
    """The reason is that of a rank, and names no temporary folder of the command."""
    write_config(tmp_path, _GPT_OSS | dict(model_type="recurrent_gemma"))
    done = run_here("verify", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert "model.layers.0.temporal_block.conv_1d (a convolution over 4 tokens)" in done.err
    assert "/tmp" not in done.err.replace(str(tmp_path), "")


def test_json_has_the_reason_of_a_refusal(tmp_path: Path) -> None:
    """The object of a model that is not served says why, and the exit code is 2 too."""
    write_config(tmp_path, _GPT_OSS | dict(model_type="no-such-type"))
    done = run_here("verify", str(tmp_path), "--json")
    assert done.code == 2
    answer = json.loads(done.out)
    assert answer["verified"] is False and "no-such-type" in answer["reason"]


def test_json_has_what_was_compared(tmp_path: Path) -> None:
    """--json prints one object with the model's type, the small copy's layers and the four cases."""
    write_config(tmp_path)
    done = run_here("verify", str(tmp_path), "--json", "--max-model-len", "4096")
    answer = json.loads(done.out)
    assert (answer["verified"], answer["model_type"], answer["layers"]) == (True, "llama", 8)
    assert len(answer["cases"]) == 4


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    """A missing folder, and a context longer than the model's, are refused with what to change."""
    done = run_here("verify", str(tmp_path / "nothing/here/at/all"))
    assert done.code == 2 and "give a model's directory" in done.err
    done = run_here("verify", write_config(tmp_path), "--max-model-len", "200000")
    assert done.code == 2 and "supports 131072; use at most that" in done.err


def test_a_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process that compares is killed, the error says so instead of blaming the model."""
    monkeypatch.setattr(verify, "_messages", lambda settings: iter([{"stage": "checking its layers"}]))
    done = run_here("verify", write_config(tmp_path))
    assert done.code != 0 and "ended early" in done.err
