"""LmHead: a causal model's last step, from normed hidden states to logits.

The model's own code around `lm_head` runs unchanged, because soft-caps and logit scaling differ between architectures.
The base model is replaced by one that returns the given hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from coatcheck.proto.errors import InvalidModel


class LmHead:
    """Removes the base model from `model` and keeps the rest."""

    def __init__(self, model: PreTrainedModel) -> None:
        setattr(model, model.base_model_prefix, _PassThroughBody())
        self.model: Any = model

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        logits: Tensor = self.model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()


@dataclass
class _BodyOutput(MoeModelOutputWithPast):
    """Has the further fields that the heads of GPT-2, BioGPT and Gemma 4 copy into their output."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _PassThroughBody(nn.Module):
    @property
    def decoder(self) -> Self:
        """OPT's head calls this part of its base model."""
        return self

    def forward(self, *unused: Any, inputs_embeds: Tensor, **also_unused: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def probe_head(model: PreTrainedModel) -> None:
    """Run the head once on the meta device. Raises InvalidModel if it needs more than hidden states."""
    name = model.base_model_prefix
    base, config = model.base_model, model.config
    hidden = torch.empty(1, config.hidden_size, dtype=model.dtype, device="meta")
    try:
        with _buffers_on_meta(model), torch.inference_mode():
            shape = tuple(LmHead(model).logits(hidden).shape)
    except Exception as error:  # the model's code may raise anything
        raise InvalidModel(f"{config.model_type} cannot be served: its head needs more than hidden states") from error
    finally:
        setattr(model, name, base)
    if shape != (1, config.vocab_size):
        raise InvalidModel(
            f"{config.model_type} cannot be served: its logits for one token have shape {list(shape)} instead of "
            f"[1, {config.vocab_size}]"
        )


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Move the buffers to meta for the duration: torch refuses operations between meta tensors and a GPU's."""
    original = {module: dict(module._buffers) for module in model.modules()}
    try:
        for module, buffers in original.items():
            module._buffers.update({name: None if b is None else b.to("meta") for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in original.items():
            module._buffers.update(buffers)
