"""CheckpointCheck: the files of a local model that ranks and routers read, checked before anything starts.

Of weights only the headers are read, by the code that ranks use. This module does not import torch or Ray.
"""

from pathlib import Path
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.preflight.config_json import with_defaults
from coatcheck.cluster.preflight.tensors import check_tensors
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.safetensors_headers import read_entries, stored_dtype

# Files from which transformers makes a tokenizer if there is no tokenizer.json.
_OTHER_TOKENIZERS: Final = ("*.model", "vocab.*", "*.tiktoken", "tekken.json", "merges.txt")


def check_checkpoint(config: ServeConfig) -> None:
    """Raises InvalidModel for weights or a tokenizer that are missing or cannot be read, and for weights that do not
    belong to the config.json.

    Skipped for a hub id, and if an existing Ray cluster is joined, whose nodes may have files that this host lacks.
    """
    directory = Path(config.model_source)
    if config.ray_address is not None or not directory.is_dir():
        return
    entries = read_entries(directory)
    name, entry = next(iter(entries.items()))
    stored_dtype(directory.name, name, entry)
    check_tensors(with_defaults(ModelConfig.open(config.model_source)), entries)
    _check_tokenizer(directory)


def _check_tokenizer(directory: Path) -> None:
    if (directory / "tokenizer.json").exists():
        from coatcheck.router.text.tokenizer import (
            TokenizerJson,  # imported late: a broken checkpoint is refused sooner
        )

        TokenizerJson.load(str(directory))
    elif not any(file for pattern in _OTHER_TOKENIZERS for file in directory.glob(pattern)):
        raise InvalidModel(
            f"{directory} has no tokenizer (no tokenizer.json, nor any that transformers could make one of); "
            "copy the model's tokenizer files there"
        )
