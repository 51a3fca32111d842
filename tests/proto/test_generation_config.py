"""generation_config.json: its sampling values, its eos_token_id, and the error for each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.generation_config import FILE, SamplingDefaults, end_token_ids, sampling_defaults

READ: list[tuple[dict[str, Any], SamplingDefaults]] = [
    ({}, SamplingDefaults()),
    ({"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 9},
     SamplingDefaults(temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.5, max_new_tokens=9)),
    ({"do_sample": True, "temperature": 0.5}, SamplingDefaults(temperature=0.5)),
    ({"temperature": 0.5}, SamplingDefaults(temperature=0.5)),  # without do_sample, as vLLM has it
    ({"do_sample": False, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5,
      "max_new_tokens": 9}, SamplingDefaults(temperature=0.0, repetition_penalty=1.5, max_new_tokens=9)),
    ({"temperature": 1, "top_k": -1}, SamplingDefaults(temperature=1.0, top_k=0)),
    ({"temperature": None, "top_k": None, "do_sample": None, "max_new_tokens": None}, SamplingDefaults()),
    ({"max_length": 20, "num_beams": 4, "penalty_alpha": 0.5, "eos_token_id": [2, 7], "bos_token_id": 1,
      "transformers_version": "4.42.3", "cache_implementation": "hybrid", "x": {"y": []}}, SamplingDefaults()),
]  # fmt: skip
WRONG: list[tuple[str, str]] = [
    ('{"temperature": "hot"}', "temperature is 'hot'; it must be a number"),
    ('{"temperature": true}', "temperature is True; it must be a number"),
    ('{"temperature": -1}', r"temperature is -1; it must be in \[0, 100\]"),
    ('{"temperature": NaN}', "temperature is nan; it must be"),
    ('{"temperature": Infinity}', "temperature is inf; it must be"),
    ('{"top_p": 0}', "top_p is 0; it must be"),
    ('{"top_p": 1e-60}', "top_p is 0.0; it must be"),  # on the wire
    ('{"top_p": [0.9]}', r"top_p is \[0.9\]; it must be a number"),
    ('{"top_k": 2.5}', "top_k is 2.5; it must be a whole number"),
    ('{"top_k": 4294967296}', "top_k is 4294967296; it must be"),
    ('{"min_p": 2}', "min_p is 2; it must be"),
    ('{"repetition_penalty": 0}', "repetition_penalty is 0; it must be"),
    ('{"max_new_tokens": 0}', "max_new_tokens is 0; it must be at least 1"),
    ('{"max_new_tokens": "many"}', "max_new_tokens is 'many'; it must be a whole number"),
    ('{"do_sample": "no"}', "do_sample is 'no'; it must be true or false"),
]
BROKEN = ["", "{", "[]", "5", '{"a": ' + "[" * 100_000, "\x00"]


def write(directory: Path, said: Any) -> Path:
    """A checkpoint directory whose generation_config.json has this content."""
    (directory / FILE).write_text(said if isinstance(said, str) else json.dumps(said))
    return directory


@pytest.mark.parametrize(("said", "meant"), READ)
def test_fields_of_the_file_are_read(tmp_path: Path, said: dict[str, Any], meant: SamplingDefaults) -> None:
    """Each supported field is read. Nulls and unknown fields are ignored."""
    assert sampling_defaults(write(tmp_path, said)) == meant


def test_without_a_file_no_default_is_set(tmp_path: Path) -> None:
    """Without the file no default and no end token is set."""
    assert sampling_defaults(tmp_path) == SamplingDefaults() and end_token_ids(tmp_path) == ()


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """A file that transformers has written is read with its values."""
    GenerationConfig(do_sample=True, temperature=0.5, top_p=0.25, top_k=7, eos_token_id=[3, 4]).save_pretrained(
        tmp_path
    )
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.5, top_p=0.25, top_k=7)
    assert end_token_ids(tmp_path) == (3, 4)


def test_a_default_is_what_the_same_number_in_a_request_would_be(tmp_path: Path) -> None:
    """The file's 0.6 is rounded to 32 bits, as protobuf rounds a request's 0.6."""
    from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams

    assert (
        sampling_defaults(write(tmp_path, {"temperature": 0.6})).temperature
        == SamplingParams(temperature=0.6).temperature
    )


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file, the field, its value and what to change. eos_token_id can still be read."""
    with pytest.raises(InvalidModel, match=f"{FILE}: {words}.*--generation-config none"):
        sampling_defaults(write(tmp_path, text))
    assert end_token_ids(tmp_path) == ()


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    """A file that is not a JSON object is refused, also when only eos_token_id is read."""
    for read in (sampling_defaults, end_token_ids):
        with pytest.raises(
            InvalidModel, match=f"{FILE} (is not valid JSON: .*|does not hold a JSON object); fetch it again"
        ):
            read(write(tmp_path, text))


def test_a_folder_of_that_name_is_no_file(tmp_path: Path) -> None:
    """A directory with the name of the file is refused with the reason of the operating system."""
    (tmp_path / FILE).mkdir()
    with pytest.raises(InvalidModel, match="cannot be read: Is a directory"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize(("said", "ends"), [(0, (0,)), ([0], (0,)), ([2, 7], (2, 7)), ([], ()), (None, ())])
def test_ends_are_one_token_or_several(tmp_path: Path, said: Any, ends: tuple[int, ...]) -> None:
    """eos_token_id is a token id or a list of them; 0 is a valid id."""
    assert end_token_ids(write(tmp_path, {"eos_token_id": said})) == ends


@pytest.mark.parametrize("said", ["end", True, 2.0, [2, None], {"a": 2}, [[2]]])
def test_ends_that_are_no_tokens_are_refused(tmp_path: Path, said: Any) -> None:
    """An eos_token_id that is neither is refused, and the error shows the value."""
    with pytest.raises(InvalidModel, match="eos_token_id is .*; it must be a token id or a list of them"):
        end_token_ids(write(tmp_path, {"eos_token_id": said}))
