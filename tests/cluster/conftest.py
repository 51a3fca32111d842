"""Fixtures of the cluster's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer and a chat template."""
    # They import torch and transformers, which most tests here do without.
    from tests.router.tiny_tokenizer import write_model
    from tests.workers.checkpoints import tiny_checkpoint

    return write_model(tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), vocab_size=600))
