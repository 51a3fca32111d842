"""The check whether ranks can serve a model, without its weights, gives the same refusals as a rank."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.servable import find_refusal
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.model.architectures import REFUSED, SERVED, write

_PLAIN = dict(tp=1, dtype="auto", max_model_len=None, deterministic_on=None, expert_parallel=False, verify=False)


def ask(path: Path, **settings: object) -> InvalidConfig | InvalidModel | None:
    return find_refusal(str(path), **(_PLAIN | settings))  # type: ignore[arg-type]  # settings vary by test


@pytest.mark.parametrize("model_type", ["glm4_moe"])
def test_a_model_that_ranks_serve_is_not_refused(model_type: str, checkpoint_directory: Path) -> None:
    """A model that ranks serve is not refused."""
    assert ask(write(model_type, checkpoint_directory, **SERVED[model_type])) is None


@pytest.mark.parametrize("model_type", ["bloom"])
def test_a_model_that_ranks_refuse_is_refused_with_the_same_reason(model_type: str, checkpoint_directory: Path) -> None:
    """A model that ranks refuse is refused with the same reason."""
    refusal = ask(write(model_type, checkpoint_directory))
    assert isinstance(refusal, InvalidModel) and re.search(REFUSED[model_type], str(refusal))


def test_settings_are_checked_against_the_model(checkpoint_directory: Path) -> None:
    """tp, max-model-len and --deterministic are checked as a rank checks them."""
    path = tiny_checkpoint("qwen3", checkpoint_directory)
    assert ask(path, tp=2, max_model_len=256, deterministic_on="cpu") is None
    for settings, said in (({"tp": 3}, "does not divide"), ({"max_model_len": 257}, "supports 256")):
        refusal = ask(path, **settings)
        assert isinstance(refusal, InvalidConfig) and said in str(refusal)
    for model_type, said in (("olmoe", "None"), ("phimoe", "behind a router that our batch-invariant kernels")):
        shape = SERVED[model_type] | dict(num_attention_heads=4, hidden_size=64)
        assert said in str(ask(write(model_type, checkpoint_directory, **shape), deterministic_on="cpu"))


def test_the_command_prints_json(checkpoint_directory: Path) -> None:
    """The command prints one JSON object as its last line."""
    settings = _PLAIN | {"model": str(write("diffllama", checkpoint_directory))}
    command = [sys.executable, "-W", "ignore", "-m", "coatcheck.workers.servable", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {
        "error": "InvalidModel",
        "message": "diffllama cannot be served: layer 0 calls attention more than once",
    }
