"""A small copy of a model is compared with transformers, and a model that differs is refused with the layer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention import attention
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.verification import verification
from coatcheck.workers.verification.comparison import (
    Difference,
    NoReference,
    find_difference,
    make_sequences,
    reference_logits,
)
from coatcheck.workers.verification.verification import verify_model, verify_once
from tests.workers.checkpoints import VOCAB, tiny_checkpoint

Change = Callable[[AttentionLayer, AttentionMetadata], AttentionLayer]


def write(directory: Path, model_type: str, **differences: Any) -> Path:
    """The folder of a model that has a config.json of published size and no weights."""
    directory.mkdir(exist_ok=True)
    CONFIG_MAPPING[model_type](**differences).save_pretrained(directory)
    return directory


def change_attention(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Make our attention compute what `change` makes of a layer's parameters."""
    right = attention.attend_cache

    def wrong(q: Tensor, cache: Any, layer: AttentionLayer, metadata: AttentionMetadata, *more: Any) -> Tensor:
        return right(q, cache, change(layer, metadata), metadata, *more)

    monkeypatch.setattr(attention, "attend_cache", wrong)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coatcheck" / "verified"


@pytest.mark.parametrize("model_type", ["glm4", "gpt_oss", "gemma3n_text"])
def test_a_model_that_equals_transformers_is_verified(model_type: str, tmp_path: Path) -> None:
    """Models of published size equal transformers in four cases; each stage is reported before it begins."""
    stages: list[str] = []
    found = verify_model(write(tmp_path / "model", model_type), progress=stages.append)
    assert (found.model_type, len(found.cases)) == (model_type, 4)
    assert stages[0] == "checking its layers" and stages[-1] == f"computing {found.cases[-1]}"


def test_nemotron_h_limits_dt_as_its_config_says(tmp_path: Path) -> None:
    """dt is limited by time_step_limit. time_step_min, which transformers takes as the least dt, changes no logit."""
    limited = tiny_checkpoint("nemotron-h", tmp_path, time_step_min=0.5, time_step_limit=[0.0, 0.7])
    logits, *_ = reference_logits(limited, sequences := make_sequences(VOCAB, 0)[:1])
    assert find_difference(limited) is None
    config = json.loads((limited / "config.json").read_text())
    for limit, least, equal in (([0.0, 0.7], 0.0, True), ([0.0, 0.6], 0.5, False), ([0.5, 0.7], 0.5, False)):
        (limited / "config.json").write_text(json.dumps(config | dict(time_step_limit=limit, time_step_min=least)))
        other, *_ = reference_logits(limited, sequences)
        assert torch.equal(logits, other) is equal


def test_mixers_without_limits_of_dt_are_served(tmp_path: Path) -> None:
    """time_step_limit may be null, which transformers' code cannot compute: dt is then from 0 to infinity."""
    unlimited = tiny_checkpoint("bamba", tmp_path, time_step_limit=None)
    assert find_difference(unlimited) is None
    logits, *_ = reference_logits(unlimited, sequences := make_sequences(VOCAB, 0)[:1])
    other, *_ = reference_logits(tiny_checkpoint("bamba", tmp_path / "limits"), sequences)
    assert torch.equal(logits, other)


def test_a_wrong_layer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If layer 2 scales its scores wrongly, the refusal names layer 2 and its kind."""
    change_attention(
        monkeypatch, lambda layer, _: replace(layer, scale=2 * layer.scale) if ".2." in layer.module else layer
    )
    with pytest.raises(InvalidModel, match=r"computed in one step, differ .* begins in layer 2 \(sliding_attention\)"):
        verify_model(write(tmp_path / "model", "olmo3"))


@pytest.mark.parametrize(
    ("case", "is_wrong"),
    [
        ("in chunks", lambda m: len(m.seq_lens) == 1 and int(m.seq_lens[0]) > int(m.cu_seqlens_q[-1])),
        ("beside another sequence", lambda m: len(m.seq_lens) == 2),
        ("on a cached prefix", lambda m: len(m.seq_lens) == 2 and int(m.block_tables[:, 0].diff()) == 0),
    ],
)  # fmt: skip
def test_the_wrong_case_is_named(
    case: str, is_wrong: Callable[[AttentionMetadata], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that is wrong only in chunks, only in mixed batches, or only on shared blocks is found as such."""
    change_attention(
        monkeypatch, lambda layer, metadata: replace(layer, scale=2 * layer.scale) if is_wrong(metadata) else layer
    )
    with pytest.raises(InvalidModel, match=f"computed {case}, differ"):
        verify_model(write(tmp_path / "model", "glm4", num_hidden_layers=2))


def test_a_difference_in_one_of_two_random_models_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts of nearly equal score, chosen differently, refuse no model."""
    monkeypatch.setattr(
        verification,
        "find_difference",
        lambda checkpoint, *, progress, seed: Difference("in chunks", 3, 0.5) if seed == 0 else None,
    )
    verify_model(write(tmp_path / "model", "glm4"))


def test_a_copy_that_the_probe_refuses_by_rounding_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probe takes two experts of nearly equal score for an effect of other tokens, a copy with half of the
    layers is compared with transformers."""

    def refuse(checkpoint: Path, **options: Any) -> Difference | None:
        if json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"] == 8:
            raise InvalidModel("another token changes the hidden states")
        return find_difference(checkpoint, **options)

    monkeypatch.setattr(verification, "find_difference", refuse)
    assert verify_model(write(tmp_path / "model", "cohere2_moe")).layers == 4


def test_a_model_that_transformers_does_not_compute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is nothing to compare with, the refusal says why."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise NoReference("its logits are not finite")

    monkeypatch.setattr(verification, "find_difference", fail)
    with pytest.raises(InvalidModel, match="glm4 cannot be verified: .*its logits are not finite"):
        verify_model(write(tmp_path / "model", "glm4"))


def test_a_model_that_is_not_served_is_refused_with_its_own_reason(tmp_path: Path) -> None:
    """A model that no rank would serve is refused with the reason that a rank gives."""
    with pytest.raises(InvalidModel, match="a convolution over 4 tokens"):
        verify_model(write(tmp_path / "model", "recurrent_gemma"))


def test_a_model_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A verified model is not computed again, until its config.json or a version changes."""
    model = write(tmp_path / "model", "glm4")
    assert verify_once(model) is not None
    assert [json.loads(record.read_text())["model_type"] for record in cache.glob("*.json")] == ["glm4"]
    assert verify_once(model) is None
    assert verify_once(write(tmp_path / "model", "glm4", attention_bias=False)) is not None
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    assert verify_once(write(tmp_path / "model", "glm4")) is not None


def test_tested_types_are_not_verified(tmp_path: Path, cache: Path) -> None:
    """The parity tests cover these types, so nothing is computed and nothing recorded."""
    assert verify_once(write(tmp_path / "model", "llama")) is None
    assert not cache.exists()


def test_a_refused_model_is_refused_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A refusal is not recorded, and names the flag that serves the model nevertheless."""
    change_attention(monkeypatch, lambda layer, _: replace(layer, scale=2 * layer.scale))
    model = write(tmp_path / "model", "glm4", num_hidden_layers=2)
    for _ in range(2):
        with pytest.raises(InvalidModel, match="differ from transformers.*--skip-verify serves it"):
            verify_once(model)
    assert not list(cache.glob("*.json"))


def test_a_cache_that_cannot_be_written_disturbs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place for records, the model is verified each time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = write(tmp_path / "model", "glm4", num_hidden_layers=2)
    assert verify_once(model) is not None and verify_once(model) is not None
