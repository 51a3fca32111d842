"""verify_model(): compares a small copy of a model, with random weights, with transformers in float32.

The parity tests cover the usual configs of some model types. A model of any other type is verified before it is served:
Coatcheck's attention, cache and batches must give the logits that transformers computes. A model that differs is
refused. The error names the layer in which the difference begins.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES
from coatcheck.workers.model.lm_head import probe_head
from coatcheck.workers.model.meta_model import build_meta_model, choose_length, read_config
from coatcheck.workers.verification.comparison import CASES, Difference, NoReference, find_difference
from coatcheck.workers.verification.random_model import write_random_checkpoint
from coatcheck.workers.verification.small_config import keep_layers, shrink_config
from coatcheck.workers.verification.verified_models import one_at_a_time, record_of, write_record

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared. `layers`: of the small copy. `cases`: keys of CASES. `transformers`: its version. `seconds`:
    how long the verification took."""

    model_type: str
    layers: int
    cases: tuple[str, ...]
    transformers: str
    seconds: float


def verify_once(
    directory: Path, max_model_len: int | None = None, progress: Progress = lambda stage: None
) -> Verification | None:
    """Verify the model in `directory`, unless its type is in TESTED_MODEL_TYPES or this host has a record of it. Raises
    InvalidModel as verify_model does."""
    config = read_config(directory)
    if config.model_type in TESTED_MODEL_TYPES:
        return None
    record = record_of(read_json_object(directory / "config.json") or {})
    with one_at_a_time(record):
        if record.exists():
            return None
        try:
            verification = verify_model(directory, max_model_len, progress)
        except InvalidModel as refusal:
            raise InvalidModel(f"{refusal}; --skip-verify serves it nevertheless") from refusal.__cause__
        write_record(record, {"model_type": verification.model_type, "transformers": verification.transformers})
    return verification


def verify_model(
    directory: Path, max_model_len: int | None = None, progress: Progress = lambda stage: None
) -> Verification:
    """Verify the model whose config.json is in `directory`. Reads no weights.

    `max_model_len`: the length to serve; None for the model's own. `progress`: called with each stage before it begins.
    Raises InvalidModel for a model that cannot be served, that differs from transformers, or that cannot be compared,
    and InvalidConfig for a `max_model_len` that the model does not support.
    """
    with _one_thread(), _no_progress_bars():
        return _verify(read_config(directory), max_model_len, progress)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread. Products of these small sizes take longer on several threads, and ten times as long on a
    busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the progress bar that transformers shows for every checkpoint that it reads or writes."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _verify(config: Any, max_model_len: int | None, progress: Progress) -> Verification:
    began = time.monotonic()
    progress("checking its layers")
    length = choose_length(config, max_model_len)
    causal = build_meta_model(config, torch.float32, torch.device("cpu"), length)
    probe_attention(causal, length)
    probe_head(causal)
    small = shrink_config(config)
    try:
        try:
            difference = _difference_of(small, progress)
        except InvalidModel:
            # The whole model has passed the probe. In a small copy two experts may have nearly equal scores. Rounding
            # then chooses between them, and the probe takes that for an effect of other tokens. So try another copy.
            small = keep_layers(small, -(-small.num_hidden_layers // 2))
            difference = _difference_of(small, progress)
    except NoReference as error:
        raise InvalidModel(
            f"{config.model_type} cannot be verified: transformers does not compute a small copy of it ({error})"
        ) from error
    if difference is not None:
        progress("looking for the layer where the difference begins")
        raise InvalidModel(
            f"{config.model_type} cannot be served: in a small copy of this model with random weights, {difference}. "
            f"The difference begins in {_first_layer(small)}. Report this with config.json, or try another release of "
            f"transformers than {metadata.version('transformers')}"
        )
    return Verification(
        model_type=config.model_type,
        layers=small.num_hidden_layers,
        cases=tuple(CASES),
        transformers=metadata.version("transformers"),
        seconds=time.monotonic() - began,
    )


def _difference_of(config: Any, progress: Progress = lambda stage: None) -> Difference | None:
    """The difference of a random model of this config; None unless a second random model differs, too.

    Between two experts of nearly equal score rounding may choose differently. That happens in one random model, but not
    in two.
    """
    first = None
    for seed in (0, 1):
        with tempfile.TemporaryDirectory() as directory:
            try:
                checkpoint = write_random_checkpoint(config, Path(directory), seed=seed)
                difference = find_difference(checkpoint, progress=progress, seed=seed)
            except (InvalidModel, NoReference):
                raise
            except Exception as error:  # the model's code may raise anything
                raise NoReference(" ".join(str(error).split())[:300] or type(error).__name__) from error
        if difference is None:
            return None
        first = first or difference
    return first


def _first_layer(config: Any) -> str:
    """The layer in which the difference begins: the last layer of the shortest copy that differs."""
    kinds = getattr(config, "layer_types", None) or []
    first = config.num_hidden_layers - 1
    for count in range(1, config.num_hidden_layers):
        try:
            if _difference_of(keep_layers(config, count)) is None:
                continue
        except Exception:  # a model type that cannot have this number of layers
            continue
        first = count - 1
        break
    return f"layer {first}" + (f" ({kinds[first]})" if first < len(kinds) else "")
