"""The tables of families and formats in docs/models.md and README.md: each is served with the tokens of its
dequantised weights."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import ARCHITECTURES, tiny_checkpoint
from tests.workers.quantised_checkpoints import EXPERT_CASES, FORMATS

# A column of the table -> the format of quantised_checkpoints.py that stands for it.
COLUMNS = {
    "W4A16": "compressed-w4a16-g32-asym", "INT8": "compressed-w8a8-int", "FP8": "compressed-fp8-channel",
    "FP8 blocks": "fp8-block", "AWQ": "awq", "GPTQ": "gptq-act-order", "NVFP4": "modelopt-nvfp4",
    "MXFP4": "compressed-mxfp4", "NF4": "nf4",
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "granite", "mixtral")
# One format of each family; the others run in full.
SAMPLE = dict(zip(FAMILIES, [*COLUMNS] * 2, strict=False))
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "models.md"
# The table of README.md: its columns, and the families of each row. A format of published experts -> its column.
README_COLUMNS = ("FP8 blocks", "FP8", "INT8", "W4A16", "AWQ", "GPTQ", "NVFP4", "MXFP4", "NF4")
README_ROWS = {
    "Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi 3, OLMo 2, Granite": FAMILIES[:-1],
    "Mixtral": ("mixtral",),
    "Qwen3-MoE": ("qwen3-moe",),
    "DeepSeek V3 and R1, Kimi K2": ("deepseek-v3",),
    "gpt-oss": ("gpt-oss",),
}
EXPERT_COLUMNS = {
    "fp8-block": "FP8 blocks", "fp8-by-row": "FP8", "int8-by-row": "INT8", "packed-int4": "W4A16", "awq": "AWQ",
    "gptq": "GPTQ", "gptq-act-order": "GPTQ", "modelopt-nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4",
}  # fmt: skip


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


def test_the_front_page_has_the_table_of_tested_formats() -> None:
    """README.md says "served" of exactly the formats that a test here, or one of published experts, tries for every
    family of the row."""
    tested = {(family, column) for family in FAMILIES for column in COLUMNS}
    tested |= {(family, EXPERT_COLUMNS[kind]) for family, kind in EXPERT_CASES}
    wanted = ["| model | " + " | ".join(README_COLUMNS) + " |"]
    for title, families in README_ROWS.items():
        cells = ["served" if {(family, column) for family in families} <= tested else "–" for column in README_COLUMNS]
        wanted.append(f"| {title} | " + " | ".join(cells) + " |")
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index(wanted[0])
    assert [lines[start], *lines[start + 2 : start + 2 + len(README_ROWS)]] == wanted


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
