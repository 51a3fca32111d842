"""The lists of docs/models.md are those of tests/workers/model/families.json and of the code."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from transformers import CONFIG_MAPPING

from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES
from tests.workers.architecture_sweep import MODEL_TYPES, documented_model_types
from tests.workers.model.architectures import REFUSED, SERVED


@pytest.fixture(scope="module")
def make_families() -> ModuleType:
    """docs/make_families.py, which is a script."""
    spec = importlib.util.spec_from_file_location(
        "make_families", Path(__file__).parents[2] / "docs" / "make_families.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(make_families: ModuleType) -> None:
    """The section of model families is that of families.json."""
    section = make_families.PAGE.read_text().partition(make_families.BEGIN)[2].partition(make_families.END)[0]
    assert section == make_families.families_section(json.loads(make_families.FILE.read_text()))


def test_every_causal_type_is_in_the_file(make_families: ModuleType) -> None:
    """families.json has each type that transformers has a causal model of, except the multimodal types of another
    list; tested types are served, and types of the lists of other tests are served or refused as these tests say."""
    types: dict[str, str] = json.loads(make_families.FILE.read_text())["types"]
    assert types.keys() == set(MODEL_TYPES)
    assert all(types[model_type] == "" for model_type in TESTED_MODEL_TYPES | SERVED.keys())
    for model_type in REFUSED.keys() - {"llama4_text"}:  # the plain variant has one chunk
        assert types[model_type], model_type


def test_the_lists_do_not_overlap() -> None:
    """The page has three lists of served types: those of the parity tests, those of the file, and multimodal types."""
    tested, others, multimodal = documented_model_types()
    assert tested == TESTED_MODEL_TYPES and multimodal == MULTIMODAL_TYPES
    assert not tested & others and not (tested | others) & multimodal


@pytest.mark.parametrize(
    ("refusal", "row"),
    [
        ("x cannot be served: layers.0.conv1d (a convolution over 4 tokens) computes a token's result", 0),
        ("x cannot be served: layers 0, 1 attend, or keep a state, outside of transformers' attention interface", 1),
        ("x cannot be served: its attention does not go through transformers' attention interface", 1),
        ("x cannot be served: its attention has values [1, 4, 4, 24]; keys must be as long as queries, and values", 2),
        ("x cannot be served: layer 0 calls attention more than once", 3),
        ("x cannot be served: its attention mask is neither causal nor a sliding window", 4),
        ("x is multimodal, and its text model is not served", 5),
        ("x is an encoder-decoder; only decoder-only models are served", 6),
        ("anything else", 7),
    ],
)
def test_a_refusal_is_in_the_row_of_its_reason(refusal: str, row: int, make_families: ModuleType) -> None:
    """Each kind of refusal has a row, and every row says what to do."""
    assert make_families.reason_of(refusal) == row
    assert all(advice for _, _, advice in make_families.REASONS)


def test_types_are_those_of_transformers() -> None:
    """Every multimodal type is one of transformers'."""
    assert all(model_type in CONFIG_MAPPING for model_type in MULTIMODAL_TYPES)
