"""Reads a checkpoint's generation_config.json: sampling defaults for requests, and the tokens that end an answer.

Unknown fields and nulls are ignored. A field of a wrong type or outside its range is an error: wrong sampling makes
answers worse without any other sign. As in vLLM, a missing field has our default (temperature 1, no filter), and
`max_length` is ignored. Unlike in vLLM, `do_sample: false` means greedy, as in transformers; temperature, top_k, top_p
and min_p of the file are then ignored.
"""

import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel, InvalidRequest
from coatcheck.proto.json_file import read_json_object
from coatcheck.proto.sampling import SamplingParams

FILE: Final = "generation_config.json"
_FLOATS: Final = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS: Final = ("top_k", "max_new_tokens")
_REMEDY: Final = "correct the file, or serve with --generation-config none, which ignores its sampling values"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for sampling fields that a request leaves unset. None: the default of SamplingParams.

    `max_new_tokens`: for max_tokens; less if the context has less room.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling(self) -> dict[str, Any]:
        """Like `given_values`, without max_tokens."""
        return {name: value for name, value in self.given_values().items() if name != "max_tokens"}

    def given_values(self) -> dict[str, Any]:
        """The values that are not None, by the field names of SamplingParams."""
        values = asdict(self)
        values["max_tokens"] = values.pop("max_new_tokens")
        return {name: value for name, value in values.items() if value is not None}


NO_DEFAULTS: Final = SamplingDefaults()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """The defaults of a checkpoint directory. All are None if it has no generation_config.json.

    Raise InvalidModel that names the wrong field.
    """
    file = directory / FILE
    fields = read_json_object(file) or {}
    values: dict[str, Any] = {}
    for name in (*_FLOATS, *_COUNTS):
        value = fields.get(name)
        if value is not None:
            types, allowed = ((int,), "a whole number") if name in _COUNTS else ((int, float), "a number")
            _require(type(value) in types, file, name, value, allowed)
            values[name] = value
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)  # vLLM writes -1 for "off"
    max_new_tokens = values.pop("max_new_tokens", None)
    _require(max_new_tokens is None or max_new_tokens >= 1, file, "max_new_tokens", max_new_tokens, "at least 1")
    do_sample = fields.get("do_sample")
    _require(do_sample is None or isinstance(do_sample, bool), file, "do_sample", do_sample, "true or false")
    if do_sample is False:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    try:
        SamplingParams(**values)
        # protobuf rounds a request's values to 32 bits. Rounding may move a value out of its range.
        values |= {name: _float32(values[name]) for name in _FLOATS if name in values}
        SamplingParams(**values)
    except InvalidRequest as error:
        raise InvalidModel(f"{file}: {error}; {_REMEDY}") from None
    return SamplingDefaults(**values, max_new_tokens=max_new_tokens)


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """The file's `eos_token_id`; empty if the file or the field is missing. Raises InvalidModel."""
    fields = read_json_object(directory / FILE) or {}
    return check_end_tokens(directory, fields.get("eos_token_id"))


def check_end_tokens(directory: Path, chosen: object) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: an id, a list of ids or None. Raises InvalidModel for anything else."""
    tokens = [] if chosen is None else chosen if isinstance(chosen, list) else [chosen]
    if not all(type(token) is int for token in tokens):
        raise InvalidModel(f"{directory}: eos_token_id is {chosen!r}; it must be a token id or a list of them")
    return tuple(tokens)


def _require(holds: bool, file: Path, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidModel(f"{file}: {name} is {value!r}; it must be {allowed}: {_REMEDY}")


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
