"""The perplexity of the demo model with quantised pools, on unseen text."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver

DEMO = Path(__file__).parents[3] / "demo"
WINDOWS, LENGTH = 8, 512


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(DEMO / "model", communicator=Communicator(), device="cpu")


@pytest.fixture(scope="module")
def text() -> list[list[int]]:
    ids = Tokenizer.from_file(str(DEMO / "model/tokenizer.json")).encode((DEMO / "heldout.txt").read_text("utf-8")).ids
    return [ids[at : at + LENGTH] for at in range(0, WINDOWS * LENGTH, LENGTH)]


def perplexity(model: Model, text: list[list[int]], kv_dtype: str) -> float:
    """Perplexity when every token is read back from the pool, across chunk boundaries."""
    loss = 0.0
    for window in text:
        driver = PagedDriver(model, block_size=16, num_blocks=LENGTH // 16 + 2, kv_dtype=kv_dtype)
        sequence = driver.add_sequence(window, 0)
        hidden = torch.cat([driver.hidden(sequence, LENGTH // 4) for _ in range(4)])
        loss += F.cross_entropy(model.logits(hidden[:-1]), torch.tensor(window[1:]), reduction="sum").item()
    return math.exp(loss / len(text) / (LENGTH - 1))


@pytest.fixture(scope="module")
def plain(model: Model, text: list[list[int]]) -> float:
    return perplexity(model, text, "auto")


@pytest.mark.parametrize(("kv_dtype", "most"), [("fp16", 0.001), ("fp8", 0.005), ("int8", 0.005), ("int4", 0.05)])
def test_perplexity_stays_near(model: Model, text: list[list[int]], plain: float, kv_dtype: str, most: float) -> None:
    """fp8 and int8 stay within 0.5% of the unquantised pool and int4 within 5%, and all differ from it."""
    change = abs(perplexity(model, text, kv_dtype) / plain - 1)
    assert change < most
    assert change > 0 or kv_dtype == "fp16"
