"""ModelCheck: what config.json alone already rules out of a `coatcheck serve`, said before anything starts.

A rank finds the same, many seconds later, and has the last word: where this file is not sure, it says nothing. It knows
neither torch nor Ray.
"""

import sys
from pathlib import Path
from typing import Final

from ..proto.errors import InvalidConfig, InvalidModel
from ..workers.block_layout import BlockLayout
from ..workers.kv_dtype import choose_kv_dtype
from ..workers.pool_size import choose_host_blocks, choose_num_blocks
from ..workers.shard import Shard
from .config import ServeConfig
from .model_config import ModelConfig
from .model_shape import ModelShape

# What every decoder's config.json says, under the names of most families.
_FIELDS: Final = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
)


def check_model(config: ServeConfig) -> None:
    """Raises InvalidConfig for settings that cannot go with the model, InvalidModel for a config.json that cannot be
    read, or lacks what every model of its kind says. A hub id is asked for where the ranks will be on this host; those
    elsewhere may reach what it does not."""
    if config.ray_address is not None and not Path(config.model_source).is_dir():
        return
    model = ModelConfig.open(config.model_source)
    _check_fields(model)
    _check_length(config, model)
    model.count("num_hidden_layers", "n_layer", "num_layers", default=1, most=10_000)
    try:
        shape = ModelShape.of(model)
        vocabulary = model.number("vocab_size", default=0)
    except InvalidModel:  # of a kind that `coatcheck plan` does not know
        return
    shard = Shard(0, config.tp)
    layers = [shard.cut_layer(layer) for layer in shape.layers]
    if vocabulary and config.tp > 1:
        shard.vocabulary(vocabulary)
    dtype = config.dtype if config.dtype != "auto" else shape.dtype if shape.names_dtype else None
    if config.kv_dtype != "auto" or dtype is not None:
        _check_blocks(config, BlockLayout.of(layers, config.block_size, choose_kv_dtype(config.kv_dtype, dtype or "")))


def _check_blocks(config: ServeConfig, layout: BlockLayout) -> None:
    if config.kv_memory is not None and config.kv_memory > 1:  # a share is of what a rank finds
        choose_num_blocks(
            config.kv_memory,
            free_bytes=sys.maxsize,
            sharing_ranks=1,
            bytes_per_block=layout.bytes_per_block,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
    if config.host_kv_memory > 1:
        choose_host_blocks(
            config.host_kv_memory, free_bytes=sys.maxsize, sharing_ranks=1, bytes_per_block=layout.bytes_per_block
        )


def _check_fields(model: ModelConfig) -> None:
    """transformers would take a class's default for what is left out, and a rank find that no weight has that shape."""
    if not model.model_type:
        raise InvalidModel(f"{model.name}: config.json has no model_type; add it, or fetch config.json again")
    there = [names for names in _FIELDS if any(model.values.get(name) is not None for name in names)]
    if len(there) < 2:  # a family with names of its own
        return
    for names in _FIELDS:
        if names not in there:
            raise InvalidModel(f"{model.name}: config.json has no {names[0]}; add it, or fetch config.json again")


def _check_length(config: ServeConfig, model: ModelConfig) -> None:
    made_for = model.values.get("max_position_embeddings")
    if config.max_model_len is None or not isinstance(made_for, int):
        return
    scaling = model.values.get("rope_parameters") or model.values.get("rope_scaling") or {}
    # Whether and how far it may be stretched, its kind of scaling says; the factor is the most.
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    longest = int(made_for * factor) if isinstance(factor, int | float) and factor > 1 else made_for
    if config.max_model_len > longest:
        raise InvalidConfig(
            f"max-model-len is {config.max_model_len}, but the model goes to {longest}; use at most that"
        )
