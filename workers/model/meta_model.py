"""Builds transformers' own model from a config, on the meta device, with every computed buffer filled in.

No weight is read. What cannot be served is refused here, before anything large happens. It does not know ranks.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coatcheck.proto.errors import CoatcheckError, InvalidConfig, InvalidModel
from coatcheck.workers.attention import attention
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.model.model_rules import check_model_kind
from coatcheck.workers.model.rope_scaling import pin_rotary

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(directory: Path) -> Any:
    """The model's config; raises InvalidModel where transformers does not know it or we cannot serve it."""
    try:
        # Never code that comes with a checkpoint; left open, transformers asks at the terminal.
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever transformers and its validators raise at a config that cannot be
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(f"{directory}/config.json: {reason[:300]}") from error
    check_model_kind(
        str(directory),
        config.model_type,
        is_quantised=getattr(config, "quantization_config", None) is not None,
        is_multimodal=config.get_text_config() is not config,
        is_encoder_decoder=config.is_encoder_decoder,
    )
    if config.num_hidden_layers < 1:
        raise InvalidModel(f"{directory}/config.json has num_hidden_layers {config.num_hidden_layers}: not a model")
    return config


def choose_dtype(asked: str, config: Any, stored: torch.dtype) -> torch.dtype:
    """`auto` is the config's, or else the checkpoint's."""
    if asked == "auto":
        named: torch.dtype | None = getattr(config, "dtype", None)
        return stored if named is None or named not in DTYPES.values() else named
    if asked not in DTYPES:
        raise InvalidConfig(f"dtype is {asked!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[asked]


def build_meta_model(config: Any, dtype: torch.dtype, device: torch.device, max_model_len: int) -> PreTrainedModel:
    """The model with parameters on meta, non-persistent buffers computed on `device`, rotary fixed for the length.

    Raises InvalidModel, with the architecture's name and the reason, if that cannot be done.
    """
    attention.register_attention()
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
            model = build(config, dtype=dtype, attn_implementation=attention.NAME)
        assert isinstance(model, PreTrainedModel)
        nn.Module.train(model, False)
        if model.base_model is model and hasattr(model, "model"):  # llama4 has the prefix of its multimodal model
            model.base_model_prefix = "model"
        forgotten = _compute_buffers(model, model, device)
        pin_rotary(model, max_model_len)
    except CoatcheckError:
        raise
    except Exception as error:  # whatever the model's code raises is the reason
        raise InvalidModel(f"{config.model_type} cannot be served: {_building_failed(error)}") from error
    if forgotten:
        probe_attention(
            model, max_model_len
        )  # raises first if the model keeps a state outside of attention, the better reason
        raise InvalidModel(f"{config.model_type} cannot be served: nothing initialises {', '.join(forgotten)}")
    return model


def _building_failed(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "its attention does not go through transformers' attention interface"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"transformers cannot build it with our attention ({reason[:300]})"


def check_complete(model: nn.Module) -> None:
    """Raises InvalidModel where a parameter, buffer or plain attribute was left on the meta device."""
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for name, module in model.named_modules():
        left += [f"{name}.{k}" for k, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta]
    if left:
        raise InvalidModel(f"nothing initialises {', '.join(sorted(left)[:4])}; this architecture cannot be served")


def _compute_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> list[str]:
    """Non-persistent buffers are in no checkpoint: transformers' own initialiser computes them.

    Returns the names of those that the initialiser leaves out. Weights of the same module are on meta, where
    initialising has no cost and no effect. As in transformers, a PreTrainedModel inside the model initialises its own
    modules.
    """
    forgotten = []
    for child in module.children():
        forgotten += _compute_buffers(child if isinstance(child, PreTrainedModel) else model, child, device)
    computed = sorted(module._non_persistent_buffers_set)
    buffers = {name: buffer for name in computed if (buffer := module._buffers[name]) is not None}
    strange = [name for name, buffer in buffers.items() if not buffer.is_floating_point()]
    if not buffers or strange:
        return forgotten + strange
    for name, buffer in buffers.items():  # NaN, to detect those that the initialiser leaves out
        module._buffers[name] = torch.full_like(buffer, torch.nan, device=device)
    with torch.no_grad():
        initialise: Any = model._init_weights  # untyped, like most of transformers' methods
        initialise(module)
    return forgotten + [name for name in buffers if torch.isnan(module._buffers[name]).any()]  # type: ignore[arg-type]
