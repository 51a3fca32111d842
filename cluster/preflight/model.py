"""check_model and check_download: refuse a model or a setting that config.json alone rules out, before Ray starts.

A rank would also refuse it, but many seconds later. Doubtful cases pass, because the ranks decide. This module does not
import torch or Ray.
"""

import sys
from pathlib import Path
from typing import Any, Final, TypeGuard

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.capacity import WEIGHT_BYTES
from coatcheck.cluster.planner.hybrid_layers import WITHOUT_ATTENTION
from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import parse_bytes
from coatcheck.cluster.planner.weight_count import WeightCount
from coatcheck.cluster.preflight.config_json import check_config
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.generation_config import end_token_ids, sampling_defaults
from coatcheck.proto.model_folder import describe_other_path, no_type_error
from coatcheck.workers.checkpoint.quantisation_scheme import check_quantization, read_scheme
from coatcheck.workers.core.attention_selector import MODEL_TYPES_WITH_SINKS, check_backend_model
from coatcheck.workers.core.group_config import is_share
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_host_blocks, choose_num_blocks
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES, check_causal, check_known
from coatcheck.workers.model.model_rules import (
    check_convolutions,
    check_deterministic_heads,
    check_deterministic_states,
    check_docstrings,
    check_host_tier,
    check_latent_attention,
    check_mla_shard,
    check_model_kind,
    check_state_device,
    resolve_max_model_len,
)

# The sizes in every decoder's config.json, under the names that most families use.
_FIELDS: Final = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
)
# Names of the number of experts in the config.json of different model families.
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_model_directory(config: ServeConfig) -> None:
    """Raise InvalidConfig if `model` is a path but not a checkpoint directory. A model id is not checked."""
    path = Path(config.model).expanduser()
    if not path.exists():
        if _looks_like_a_path(config.model):
            raise InvalidConfig(
                f"model directory {config.model} does not exist; give a directory, a GGUF file or a Hugging Face model "
                "id"
            )
        return
    if not (path / "config.json").is_file():
        raise InvalidConfig(describe_other_path(path))


def _looks_like_a_path(model: str) -> bool:
    """Whether `model` means a path. OWNER/NAME is a Hugging Face model id unless OWNER is a local directory."""
    path = Path(model).expanduser()
    if path.is_absolute() or model.startswith(("~", ".")) or model.count("/") > 1:
        return True
    return len(path.parts) > 1 and Path(path.parts[0]).is_dir()


def check_model(config: ServeConfig) -> None:
    """Raise InvalidConfig for settings that do not fit the model.

    Raise InvalidModel for a config.json that cannot be read or that lacks a size. A model id is looked up only if ranks
    run on this host: other hosts may reach a hub that this host cannot reach.
    """
    if config.ray_address is not None and not Path(config.model_source).is_dir():
        return
    if config.ray_address is None:  # else processes of other hosts build the model
        check_docstrings()
    _check_generation_config(config)
    model = ModelConfig.open(config.model_source)
    _check_model_type(model)
    scheme = read_scheme(model.name, model.values)
    check_quantization(model.name, config.quantization, scheme)
    _check_sizes(model)
    check_config(model)
    check_latent_attention(model.name, model.model_type, model.values)
    model = fill_defaults(model)
    _check_length(config, model)
    model.count("num_hidden_layers", "n_layer", "num_layers", default=1, most=10_000)
    try:
        shape = ModelShape.of(model)
        vocabulary = model.number("vocab_size", default=0)
    except InvalidModel:
        if model.model_type in TESTED_MODEL_TYPES:
            raise
        return  # a model type that `coatcheck plan` does not know
    _check_shape(config, model, shape, vocabulary)


def _check_shape(config: ServeConfig, model: ModelConfig, shape: ModelShape, vocabulary: int) -> None:
    """Raise InvalidConfig if `tp` ranks cannot divide the model or a setting does not fit its layers, and InvalidModel
    for layers that are not supported. `vocabulary`: the number of tokens; 0 if unknown."""
    check_convolutions(model.model_type, model.values, shape.states)
    check_host_tier(model.model_type, config.host_kv_memory, has_states=bool(shape.states))
    if config.mla_shard == "tokens":
        check_mla_shard(model.model_type, shape.is_latent)
    shard = TpShard(0, config.tp, divides_latents=config.mla_shard == "tokens")
    layers = [shard.shard_layer(layer) for layer in shape.layers]
    for state in shape.states:
        shard.shard_state(state)
    if config.device == "cuda":
        check_state_device(config.device, model.model_type, model.values, shape.states)
    if vocabulary and config.tp > 1:
        shard.vocab_rows(vocabulary)
    if config.expert_parallel:
        _check_experts(model, shard)
    else:
        _check_mlp(model, shard)
    if config.deterministic and config.device == "cpu":
        for layer in layers:
            check_deterministic_heads(layer)
        check_deterministic_states(model.model_type, model.values, shape.states)
    _check_attention(config, model, shape, layers)


def _check_attention(config: ServeConfig, model: ModelConfig, shape: ModelShape, layers: list[LayerSpec]) -> None:
    """Raise InvalidConfig if the attention backend cannot compute `layers`, as rank 0 has them, or if the KV pool of
    the settings is too small."""
    dtype = config.dtype if config.dtype != "auto" else shape.dtype if shape.names_dtype else None
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype or "") if config.kv_dtype != "auto" or dtype is not None else None
    check_backend_model(
        config.attention_backend,
        layers,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=config.deterministic,
        has_sinks=model.model_type in MODEL_TYPES_WITH_SINKS,
    )
    if kv_dtype is not None:
        _check_blocks(config, BlockLayout.of(layers, config.block_size, kv_dtype))


def _check_generation_config(config: ServeConfig) -> None:
    """Raise InvalidModel for a generation_config.json that ranks or routers would refuse. Skipped for a model id."""
    directory = Path(config.model_source)
    if directory.is_dir():
        end_token_ids(directory)
        if config.generation_config == "auto":
            sampling_defaults(directory)


def _check_blocks(config: ServeConfig, layout: BlockLayout) -> None:
    """Raise InvalidConfig if a pool is too small. Sizes that are shares of free memory are left to the ranks, which
    measure it."""
    if config.kv_memory is not None and not is_share(config.kv_memory):
        choose_num_blocks(
            config.kv_memory,
            free_bytes=sys.maxsize,
            sharing_ranks=1,
            bytes_per_block=layout.bytes_per_block,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_blocks=layout.max_blocks,
        )
    if not is_share(config.host_kv_memory):
        choose_host_blocks(
            config.host_kv_memory, free_bytes=sys.maxsize, sharing_ranks=1, bytes_per_block=layout.bytes_per_block
        )


def _check_model_type(model: ModelConfig) -> None:
    """Raise InvalidModel for a model that transformers cannot build, or of a kind that is not served."""
    if not model.model_type:
        raise no_type_error(model.name, model.values)
    check_known(model.name, model.model_type, has_auto_map="auto_map" in model.values)
    check_model_kind(
        model.model_type,
        is_multimodal=not model.is_served,
        is_encoder_decoder=model.values.get("is_encoder_decoder") is True,
    )
    check_causal(model.name, model.model_type)


def _check_sizes(model: ModelConfig) -> None:
    """Raise InvalidModel for a missing size: transformers would use its default, which does not fit the weights."""
    if model.is_multimodal:  # their text_config is published without fields that have the class's default
        return
    given = [names for names in _FIELDS if any(model.values.get(name) is not None for name in names)]
    if len(given) < 2:  # a model family with other field names
        return
    for names in _FIELDS[:2] if model.model_type in WITHOUT_ATTENTION else _FIELDS:
        if names not in given:
            raise InvalidModel(f"{model.name}: config.json has no {names[0]}; add it, or fetch config.json again")


def _check_length(config: ServeConfig, model: ModelConfig) -> None:
    made_for, index_topk = model.values.get("max_position_embeddings"), model.number("index_topk", default=0) or None
    scaling = model.values.get("rope_parameters") or model.values.get("rope_scaling") or {}
    if config.max_model_len is None or not isinstance(made_for, int) or not isinstance(scaling, dict):
        return
    kind = scaling.get("rope_type", scaling.get("type"))  # newer and older config.json
    numbers = {name: value for name, value in scaling.items() if _is_number(value)}
    resolve_max_model_len(config.max_model_len, made_for, {**numbers, "rope_type": kind}, index_topk)


def _check_experts(model: ModelConfig, shard: TpShard) -> None:
    """Raise InvalidConfig if --expert-parallel does not fit the model."""
    counts = {name: model.values.get(name) for name in _EXPERTS}
    name = next((name for name, count in counts.items() if _is_number(count) and count > 0), None)
    if name is not None:
        shard.split_evenly(model.count(name), f"{name} in config.json, as --expert-parallel needs")
    elif model.model_type in TESTED_MODEL_TYPES:
        raise InvalidConfig(f"expert-parallel: {model.model_type} has no experts; leave --expert-parallel out")


def _check_mlp(model: ModelConfig, shard: TpShard) -> None:
    """Raise InvalidConfig if tp does not divide the MLP. Only for tested types, whose linears are all sharded."""
    if model.model_type in TESTED_MODEL_TYPES:
        names = ["moe_intermediate_size" if model.model_type == "qwen3_moe" else "intermediate_size"]
        if "kv_lora_rank" in model.values:  # DeepSeek's first layers are dense
            names.append("moe_intermediate_size")
        for name in names:
            if _is_number(size := model.values.get(name)):
                shard.split_evenly(int(size), name)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_download(config: ServeConfig, limit: str | None) -> None:
    """Raise InvalidModel if the weights of a model id, as config.json counts them, take more than `limit`, such as
    "100GiB". Raise InvalidConfig if `limit` is not a size.

    Kubernetes evicts a pod that outgrows its volume, and the next pod begins the same download. Skipped for a
    directory, for quantised weights, and if the hub cannot be asked from here.
    """
    if limit is None:
        return
    try:
        most = parse_bytes(limit)
    except ValueError as error:
        raise InvalidConfig(f"--max-download is {limit!r}; {error}") from None
    if Path(config.model_source).exists():
        return
    try:
        model = ModelConfig.open(config.model_source)
        if read_scheme(model.name, model.values) is not None:
            return
        shape = ModelShape.of(model)
        size = WeightCount.of(model, shape.expanded, TpShard(0, 1)).total * WEIGHT_BYTES[shape.dtype]
    except (InvalidModel, InvalidConfig):  # the ranks say what is wrong, if it is
        return
    if size > most:
        takes, may_take = (f"{one / 2**30:,.0f} GiB" for one in (size, most))
        raise InvalidModel(
            f"the weights of {model.name} take {takes}, and a download may take {may_take}; "
            "keep downloads elsewhere (the chart's hubCache.kind), or allow more (storage.cacheSize, --max-download)"
        )
