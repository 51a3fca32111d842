"""The table of families and formats in docs/models.md: each is served with the tokens of its dequantised weights."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import ARCHITECTURES, tiny_checkpoint
from tests.workers.quantised_checkpoints import FORMATS

# A column of the table -> the format of quantised_checkpoints.py that stands for it.
COLUMNS = {
    "W4A16": "compressed-w4a16-g32-asym", "INT8": "compressed-w8a8-int", "FP8": "compressed-fp8-channel",
    "FP8 blocks": "fp8-block", "AWQ": "awq", "GPTQ": "gptq-act-order", "NF4": "nf4",
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "granite", "mixtral")
# One format of each family; the others run in full.
SAMPLE = dict(zip(FAMILIES, [*COLUMNS] * 2, strict=False))
PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def rows() -> list[str]:
    """The rows of the table, as the tests below show them."""
    return [
        "| family | " + " | ".join(COLUMNS) + " |",
        *(f"| {family} | " + " | ".join(["served"] * len(COLUMNS)) + " |" for family in FAMILIES),
    ]


def test_the_page_has_the_table_of_these_tests() -> None:
    """docs/models.md lists exactly the families and formats that are tested here."""
    table = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (family|\w+ \| served) ", line)]
    assert table == rows()


@pytest.mark.parametrize(
    ("family", "column"),
    [
        pytest.param(family, column, marks=[] if SAMPLE[family] == column else [pytest.mark.full])
        for family in FAMILIES
        for column in COLUMNS
    ],
)
def test_a_family_gives_the_tokens_of_its_dequantised_weights(family: str, column: str, tmp_path: Path) -> None:
    """Served in float32, the quantised checkpoint gives the greedy tokens of a checkpoint with its dequantised
    weights."""
    assert family in ARCHITECTURES
    source = tiny_checkpoint(family, tmp_path)
    plain = FORMATS[COLUMNS[column]](source, tmp_path / "quantised")
    reference = Path(shutil.copytree(source, tmp_path / "plain"))
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()}, reference / "model.safetensors", {"format": "pt"}
    )
    prompt = [3 + 7 * place % 190 for place in range(30)]
    tokens = []
    for path in (tmp_path / "quantised", reference):
        model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
        tokens.append(PagedDriver(model).greedy([prompt], 20, chunk=16)[0])
    assert tokens[0] == tokens[1]
