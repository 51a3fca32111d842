"""What a checkpoint's generation_config.json says: sampling values for what a request leaves unset, and the tokens that
end an answer.

A field that is not named here is ignored, and so is a null. A field of a wrong type or outside its range is an error:
a model that is sampled otherwise than its makers meant gives worse answers, and nothing shows it. The fields are those
of transformers, and they are read as vLLM reads them: what the file leaves out stays at our own default (temperature 1,
no filter), and `max_length` is ignored. Unlike vLLM, `do_sample: false` is honoured: it means greedy, as it does in
transformers, and then the file's temperature, top_k, top_p and min_p do not count.
"""

import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .errors import InvalidModel, InvalidRequest
from .json_file import read_json_object
from .sampling import SamplingParams

FILE: Final = "generation_config.json"
_FLOATS: Final = ("temperature", "top_p", "min_p", "repetition_penalty")
_WITHOUT: Final = "mend the file, or serve with --generation-config none, which leaves its sampling out"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves unset; None: SamplingParams' own default. `max_new_tokens` is the most tokens of
    an answer whose request names no max_tokens; less where the context holds less."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling(self) -> dict[str, Any]:
        """The values that are set, by SamplingParams' names, without `max_new_tokens`."""
        return {name: value for name, value in self.given().items() if name != "max_tokens"}

    def given(self) -> dict[str, Any]:
        """The values that are set, by SamplingParams' names."""
        values = asdict(self)
        values["max_tokens"] = values.pop("max_new_tokens")
        return {name: value for name, value in values.items() if value is not None}


NO_DEFAULTS: Final = SamplingDefaults()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """The defaults of a checkpoint directory; NO_DEFAULTS without such a file. Raises InvalidModel with the field."""
    file = directory / FILE
    said = read_json_object(file) or {}
    values: dict[str, Any] = {}
    for name in _FLOATS:
        value = said.get(name)
        if value is not None:
            _require(isinstance(value, int | float) and not isinstance(value, bool), file, name, value, "a number")
            values[name] = value
    for name in ("top_k", "max_new_tokens"):
        value = said.get(name)
        if value is not None:
            _require(isinstance(value, int) and not isinstance(value, bool), file, name, value, "a whole number")
            values[name] = value
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)  # vLLM writes -1 for "off"
    most = values.pop("max_new_tokens", None)
    _require(most is None or most >= 1, file, "max_new_tokens", most, "at least 1")
    do_sample = said.get("do_sample")
    _require(do_sample is None or isinstance(do_sample, bool), file, "do_sample", do_sample, "true or false")
    if do_sample is False:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    try:
        SamplingParams(**values)
        # Rounded to 32 bits, as a request's values are by protobuf; a value in range may round out of it.
        values |= {name: _float32(values[name]) for name in _FLOATS if name in values}
        SamplingParams(**values)
    except InvalidRequest as error:
        raise InvalidModel(f"{file}: {error}; {_WITHOUT}") from None
    return SamplingDefaults(**values, max_new_tokens=most)


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an answer; none where the file does not say. Raises InvalidModel."""
    said = read_json_object(directory / FILE) or {}
    return check_end_tokens(directory, said.get("eos_token_id"))


def check_end_tokens(directory: Path, chosen: object) -> tuple[int, ...]:
    """The ids of an `eos_token_id`, which is one or a list of them, or None; raises InvalidModel for anything else."""
    tokens = [] if chosen is None else chosen if isinstance(chosen, list) else [chosen]
    if not all(type(token) is int for token in tokens):
        raise InvalidModel(f"{directory}: eos_token_id is {chosen!r}; it must be a token id or a list of them")
    return tuple(tokens)


def _require(holds: bool, file: Path, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidModel(f"{file}: {name} is {value!r}; it must be {allowed}: {_WITHOUT}")


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
