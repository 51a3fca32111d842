"""The model without weights: transformers' own modules on the meta device, checked before any weight is read.

`prepare_model` is what a rank does before it loads weights: it builds the modules from config.json, finds the attention
parameters (attention_probe.py) and plans the shards. `coatcheck serve` runs it to find out whether an untested
architecture can be served. It takes seconds for any model size.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from coatcheck.kernels import native
from coatcheck.proto.errors import CoatcheckError, InvalidConfig, InvalidModel
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.attention import attention
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.attention.state_layers import StateLayer, correct_dt_limits, find_state_layers
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.model_alias import is_alias, resolve_alias
from coatcheck.workers.checkpoint.sharding_plan import ShardingPlan, plan_sharding
from coatcheck.workers.checkpoint.text_tower import text_fields, text_model_type
from coatcheck.workers.core.model_spec import DeltaNetSpec
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.fusion import LATENT_TYPES, computes_delta_nets, is_fusable
from coatcheck.workers.model.latent_attention import latent_projections
from coatcheck.workers.model.lm_head import probe_head
from coatcheck.workers.model.model_rules import (
    check_convolutions,
    check_deterministic_heads,
    check_deterministic_states,
    check_docstrings,
    check_latent_attention,
    check_mixer_activation,
    check_model_kind,
    check_state_device,
    deterministic_experts_error,
)
from coatcheck.workers.model.module_adapters import adapt_modules, has_own_attention, has_replaceable_norms
from coatcheck.workers.model.packed_linears import record_weight_reads
from coatcheck.workers.model.rope import choose_max_model_len, pin_rope_scaling
from coatcheck.workers.model.sparse_mlp import (
    check_expert_parallel,
    drop_weights_of_identity_experts,
    is_known_block,
    missing_tp_plan,
    router_linears,
)

_PROBED_LENGTH: Final = 4096
_UNLIMITED_LENGTH: Final = 32768  # the default of --max-model-len for models whose length nothing limits
# Names of linears, apart from attention, that can have LoRA adapters: in fused models, and in others.
_FUSED_MLP: Final = re.compile(r".+\.layers\.\d+\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)")
_ANY_MLP: Final = re.compile(r".+\.(layers|h|blocks)\.\d+\.(?!linear_attn\.)\w+\.\w+")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model without weights that this rank can serve.

    `layers`: the attention layers. `states`: the layers that keep a state. Both with the heads of all ranks.
    `plan`: this rank's slice of each parameter.
    `unpackable_linears`: linears whose weight or sizes the model's own code or LatentAttention reads.
    """

    causal: PreTrainedModel
    layers: list[AttentionLayer]
    states: list[StateLayer]
    unpackable_linears: Collection[nn.Module]
    plan: ShardingPlan
    dtype: torch.dtype
    max_model_len: int


def prepare_model(
    checkpoint: Checkpoint,
    shard: TpShard,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int | None,
    deterministic_on: torch.device | None,
    expert_parallel: bool,
) -> PreparedModel:
    """Build a checkpoint's model on the meta device, with computed buffers on `device`. Reads no weight.

    `deterministic_on`: the device on which the model must be deterministic; None without --deterministic.
    `expert_parallel`: each rank holds whole experts.
    Raises InvalidModel for an architecture that cannot be served, InvalidConfig for a setting that does not fit it.
    """
    config = read_config(checkpoint.directory)
    values = read_json_object(checkpoint.directory / "config.json") or {}
    stored = checkpoint.dtype_of(next(iter(checkpoint.entries)))
    model_dtype = choose_dtype(dtype, config, stored)
    length = choose_length(config, max_model_len)
    causal = build_meta_model(config, model_dtype, device, length)
    with record_weight_reads(causal) as unpackable_linears:
        layers = probe_attention(causal, length)
        probe_head(causal)
    states = find_state_layers(causal)
    specs = [state.spec for state in states]
    check_convolutions(config.model_type, values, specs)
    _check_mixers(causal, layers, states)
    check_state_device(device.type, config.model_type, values, specs)
    if deterministic_on is not None:
        check_deterministic(causal, layers, model_dtype, deterministic_on)
        if deterministic_on.type == "cpu":
            check_deterministic_states(config.model_type, values, specs)
        if unpackable_linears - router_linears(causal):
            raise InvalidConfig(
                f"deterministic: the code of {config.model_type} reads weights of its linears directly, so our "
                "batch-invariant kernels cannot compute them; serve it without --deterministic"
            )
    if expert_parallel:
        check_expert_parallel(causal)
    names: dict[Any, str] = {module: name for name, module in causal.named_modules()}
    get_lm_head: Any = causal.get_output_embeddings
    plan = plan_sharding(
        {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()},
        {**causal.tp_plan, **missing_tp_plan(causal)},
        layers,
        names[causal.get_input_embeddings()],
        names[get_lm_head()],
        shard,
        expert_parallel=expert_parallel,
        # Gemma 3n's sparse MLPs compare each gate with all gates of the token, so a rank needs all of them.
        whole=[name for module, name in names.items() if getattr(module, "activation_sparsity", 0)],
        states=states,
    )
    for name in (names[linear] for linear in unpackable_linears):
        if f"{name}.weight" in plan.slices:
            raise InvalidModel(
                f"the code of {config.model_type} reads the weight of {name} directly, of which each rank would hold "
                "only a part; serve it with tp 1"
            )
    unpackable_linears |= latent_projections(causal, layers)
    return PreparedModel(causal, layers, states, unpackable_linears, plan, model_dtype, length)


def adaptable_linears(prepared: PreparedModel) -> dict[str, tuple[int, int]]:
    """[out, in] of the linears that can have LoRA adapters, by name: those of the attention and MLP of each layer.
    Excluded: latent and gated attention, whose weights are reordered, linear attention, experts, and shared weights."""
    ties: dict[str, str] = prepared.causal.all_tied_weights_keys  # the linears that share one have an adapter each
    shared = {name.rpartition(".")[0] for pair in ties.items() for name in pair}
    attention = {layer.module for layer in prepared.layers if not layer.is_latent and not layer.has_gate}
    others = _FUSED_MLP if is_fusable(prepared.causal) else _ANY_MLP
    shapes = {}
    for name, module in prepared.causal.named_modules():
        is_served = name not in shared and (name.rpartition(".")[0] in attention or others.fullmatch(name))
        if type(module) is nn.Linear and is_served and module not in prepared.unpackable_linears:
            shapes[name] = (module.out_features, module.in_features)
    return shapes


def read_config(directory: Path) -> Any:
    """transformers' config object, or the config of the text model of a multimodal checkpoint.

    Raises InvalidModel for a model type that transformers or Coatcheck lacks.
    """
    try:
        values = read_json_object(directory / "config.json") or {}
        if is_alias(values):
            fields = resolve_alias(values)
            config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        else:
            # Code in the checkpoint never runs. Without this argument transformers asks the user at the terminal.
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if text_model_type(config.to_dict()) is not None:
            fields = text_fields(config.to_dict(), config.get_text_config(decoder=True).to_dict())
            config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception as error:  # transformers and its validators raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(f"{directory}/config.json: {reason[:300]}") from error
    check_model_kind(
        config.model_type,
        is_multimodal=config.get_text_config() is not config,
        is_encoder_decoder=config.is_encoder_decoder,
    )
    check_latent_attention(str(directory), config.model_type, config.to_dict())
    if config.num_hidden_layers < 1:
        raise InvalidModel(f"{directory}/config.json has num_hidden_layers {config.num_hidden_layers}; it must be >= 1")
    return config


def choose_length(config: Any, requested: int | None) -> int:
    """The result of choose_max_model_len. A model without max_position_embeddings is probed first: if it keeps a state
    that is not served, the probe raises that as the reason, and without attention nothing limits the length."""
    if not getattr(config, "max_position_embeddings", None):
        model = build_meta_model(config, torch.float32, torch.device("cpu"), _PROBED_LENGTH)
        if not probe_attention(model, _PROBED_LENGTH):
            return requested or _UNLIMITED_LENGTH
    return choose_max_model_len(config, requested)


def choose_dtype(requested: str, config: Any, stored: torch.dtype) -> torch.dtype:
    """The dtype to serve in. `auto`: the dtype of config.json, or else `stored`, that of the checkpoint's tensors."""
    if requested == "auto":
        named: torch.dtype | None = getattr(config, "dtype", None)
        return stored if named is None or named not in DTYPES.values() else named
    if requested not in DTYPES:
        raise InvalidConfig(f"dtype is {requested!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[requested]


def build_meta_model(config: Any, dtype: torch.dtype, device: torch.device, max_model_len: int) -> PreTrainedModel:
    """transformers' model with parameters on meta, and non-persistent buffers computed on `device`.

    RoPE scaling is pinned to `max_model_len`. Raises InvalidModel, with the model type and the reason, if transformers
    cannot build the model with our attention.
    """
    check_docstrings()
    attention.register_attention()
    try:
        try:
            with torch.device("meta"), _ArangeOnCpu():
                model = _build_uninitialised(config, dtype)
        except Exception:  # the model's code may combine these tensors with meta tensors
            with torch.device("meta"):
                model = _build_uninitialised(config, dtype)
        adapt_modules(model)
        _move_to_meta(model)
        nn.Module.train(model, False)
        _keep_in_float32(model)
        correct_dt_limits(model)
        drop_weights_of_identity_experts(model)
        if model.base_model is model and hasattr(model, "model"):  # llama4: its prefix is that of the multimodal model
            model.base_model_prefix = "model"
        _compute_buffers(model, model, device)
        uninitialised = _unset_buffers(model)
        if uninitialised:  # falcon_h1's base model initialises the buffers of its mixers
            with torch.no_grad():
                model._init_weights(model.base_model)
            uninitialised = _unset_buffers(model)
        pin_rope_scaling(model, max_model_len)
    except CoatcheckError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise InvalidModel(f"{config.model_type} cannot be served: {_explain_build_error(error)}") from error
    if uninitialised:
        probe_attention(model, max_model_len)  # if the buffers belong to a state that is not served, raises that
        raise InvalidModel(
            f"{config.model_type} cannot be served: transformers does not initialise {', '.join(uninitialised)}"
        )
    return model


def _build_uninitialised(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    build: Any = AutoModelForCausalLM.from_config  # untyped in transformers
    implementation = "eager" if has_own_attention(config.model_type) else attention.NAME
    with no_init_weights():
        model = build(config, dtype=dtype, attn_implementation=implementation)
    assert isinstance(model, PreTrainedModel)
    model.config._attn_implementation = attention.NAME
    model.tie_weights()  # left out by no_init_weights
    return model


class _ArangeOnCpu(TorchFunctionMode):
    """While it is active, `torch.arange` makes CPU tensors, and RoPE's frequencies are computed from them on the CPU.

    Before torch computes arange or a division on meta, it imports its compiler and sympy. That took 1.3 of the 7 CPU
    seconds of a rank's start (bench/LOG.md, 2026-11-23).
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.arange and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _move_to_meta(model: nn.Module) -> None:
    """Move all tensors in buffers and plain attributes to meta, as if _ArangeOnCpu had not been active."""
    for module in model.modules():
        for tensors in (module._buffers, vars(module)):
            for name, value in list(tensors.items()):
                if isinstance(value, Tensor) and not value.is_meta:
                    tensors[name] = value.to("meta")


def _keep_in_float32(model: Any) -> None:
    """Make the parameters and buffers float32 that must not be rounded to 16 bits."""
    # The differences of the bias by which DeepSeek-V3 chooses experts are smaller than bfloat16's steps. A_log is the
    # decay of gated delta nets, of which each token takes the exponential.
    kept = {"e_score_correction_bias", "A_log", *(model._keep_in_fp32_modules_strict or ())}
    patterns = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in kept]
    for name in list(model.state_dict()):
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if isinstance(owner, nn.Linear) or not any(pattern.search(name) for pattern in patterns):
            continue
        if leaf in owner._buffers:
            owner._buffers[leaf] = owner._buffers[leaf].float()
        else:
            owner._parameters[leaf] = nn.Parameter(owner._parameters[leaf].float(), requires_grad=False)


def _explain_build_error(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "its attention does not go through transformers' attention interface"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"transformers cannot build it with our attention ({reason[:300]})"


def _compute_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Compute the non-persistent buffers of `module` and its children by transformers' own initialiser.

    No checkpoint has these buffers. Those that the initialiser leaves out become NaN. The weights are on meta, where
    initialising them costs nothing. A PreTrainedModel inside the model initialises its own modules.
    """
    for child in module.children():
        _compute_buffers(child if isinstance(child, PreTrainedModel) else model, child, device)
    buffers = {name: x for name in module._non_persistent_buffers_set if (x := module._buffers[name]) is not None}
    if not buffers or not all(buffer.is_floating_point() for buffer in buffers.values()):
        return
    for name, buffer in buffers.items():
        module._buffers[name] = torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device)
    with torch.no_grad():
        initialise: Any = model._init_weights  # untyped in transformers
        initialise(module)


def _unset_buffers(model: nn.Module) -> list[str]:
    """The non-persistent buffers that `_compute_buffers` has not computed: those with NaN, or not of a float type."""
    names = [(module._buffers[name], name) for module in model.modules() for name in module._non_persistent_buffers_set]
    return [name for x, name in names if x is not None and (not x.is_floating_point() or bool(x.isnan().any()))]


def _check_mixers(causal: Any, layers: list[AttentionLayer], states: list[StateLayer]) -> None:
    """Raise InvalidModel for latent attention or a layer with a state that no kernel computes."""
    config = causal.config
    if any(isinstance(state.spec, DeltaNetSpec) for state in states) and not computes_delta_nets(causal):
        raise InvalidModel(
            f"{config.model_type} with hidden_act {config.hidden_act} cannot be served: gated delta nets are served "
            "with silu; set hidden_act, if config.json is wrong"
        )
    for state in states:
        check_mixer_activation(config.model_type, getattr(causal.get_submodule(state.module), "activation", "silu"))
    if any(layer.is_latent for layer in layers) and not is_fusable(causal):
        raise InvalidModel(
            f"{config.model_type} with hidden_act {config.hidden_act} cannot be served: latent attention is served for "
            f"{', '.join(LATENT_TYPES)} with silu; set model_type and hidden_act, if the checkpoint is one of them"
        )


def check_deterministic(
    model: PreTrainedModel, layers: list[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise InvalidConfig for a model, dtype or machine that cannot keep the guarantee of --deterministic.

    The guarantee: with the same tp and kind of machine, a request's tokens and log-probabilities have the same bits in
    any batch and any chunks, with or without a cached prefix, and after a preemption. The guarantee holds because

    - attention adds keys in one order, by absolute position (kernels/attention/paged_attention.py),
    - linears compute each row alone, or in tiles of a fixed height (kernels/layers/linear.py),
    - experts are chosen by a token's logits alone, compute rows as linears do, and are added in the order of the choice
      (kernels/layers/experts.py),
    - all-reduces add ranks in order (communicator.py),
    - a draw depends only on seed, choice and position (kernels/sampling).
    """
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "experts" and not is_known_block(model.get_submodule(name.rpartition(".")[0])):
            raise deterministic_experts_error(name, model.config.model_type)
    if device.type != "cpu":
        if not is_fusable(model) and not has_replaceable_norms(model):
            raise InvalidConfig(
                f"deterministic on a GPU is not supported for {model.config.model_type}: torch's own norms sum in an "
                "order that depends on the number of tokens, and our code does not replace them for this "
                "architecture; serve it without --deterministic"
            )
        return
    if native.library() is None or dtype not in native.TYPES:
        raise InvalidConfig(
            f"deterministic on CPU needs bfloat16 or float32 and the native kernels (here: {dtype}, "
            f"{native.native_status()}); set --dtype, install with a C compiler, or leave --deterministic out"
        )
    for layer in layers:
        check_deterministic_heads(layer)


def check_complete(model: nn.Module) -> None:
    """Raise InvalidModel if a parameter, buffer or plain attribute is still on the meta device after loading."""
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for name, module in model.named_modules():
        left += [f"{name}.{k}" for k, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta]
    if left:
        raise InvalidModel(
            f"neither the checkpoint nor transformers initialises {', '.join(sorted(left)[:4])}; this architecture "
            "cannot be served"
        )
