"""The check of free memory before weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.memory_budget import check_weights_fit
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS

_CPU = torch.device("cpu")


def announced_and_held(model: Path, dtype: str = "auto", quantization: str = "auto") -> tuple[int, int]:
    """(bytes that `check_memory` was told, bytes that the loaded rank holds)"""
    told: list[int] = []
    loaded = load_model(
        str(model),
        communicator=Communicator(),
        device="cpu",
        check_memory=told.append,
        dtype=dtype,
        quantization=quantization,
    )
    (announced,) = told
    return announced, loaded.spec.weight_bytes


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_weights_are_announced_to_the_byte(checkpoint_directory: Path, arch: str, dtype: str) -> None:
    """The dtype is that in which they are held, whatever they are stored as."""
    announced, held = announced_and_held(tiny_checkpoint(arch, checkpoint_directory), dtype=dtype)
    assert announced == held


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_that_are_quantised_are_announced_without_their_scales(
    checkpoint_directory: Path, quantization: str
) -> None:
    """The announced bytes never exceed those that are held: a model that fits is not refused."""
    model = tiny_checkpoint("llama", checkpoint_directory)
    announced, held = announced_and_held(model, dtype="float32", quantization=quantization)
    assert 0.7 * held < announced <= held


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_is_announced_as_it_is_stored(
    checkpoint_directory: Path, tmp_path: Path, name: str
) -> None:
    """In every format the announced bytes exceed those that are held by no more than what is read and not kept: GPTQ's
    group of each column, which is much of a tiny model and 0.2% of one with 4,096 columns."""
    FORMATS[name](tiny_checkpoint("llama", checkpoint_directory), tmp_path / "model")
    announced, held = announced_and_held(tmp_path / "model")
    assert 0 < announced <= 1.04 * held


def test_weights_that_exceed_the_free_memory_are_refused() -> None:
    """The message has the bytes, where they are, and what to change. Ranks of other hosts do not count."""
    config = GroupConfig("group-0", "m", "m", tp=4)
    check_weights_fit(config, 250, 1000, _CPU, ranks_on_host=4)
    check_weights_fit(config, 900, 1000, _CPU, ranks_on_host=1)
    check_weights_fit(config, 900, 1000, torch.device("cuda"), ranks_on_host=4)  # each has a GPU of its own
    here = "at least 1,004 bytes on this host or container, and 1,000 are free; use .* over more hosts, or more memory"
    with pytest.raises(InvalidConfig, match=here):
        check_weights_fit(config, 251, 1000, _CPU, ranks_on_host=4)
    with pytest.raises(InvalidConfig, match="at least 1,001 bytes on this host or container, and 1,000 are free"):
        check_weights_fit(config, 1001, 1000, _CPU, ranks_on_host=1)
    with pytest.raises(InvalidConfig, match="at least 1,001 bytes on this GPU, and 1,000 are free; .* over more GPUs"):
        check_weights_fit(config, 1001, 1000, torch.device("cuda"), ranks_on_host=4)
