"""The head: a causal model's own last step, from finished hidden states to logits.

Soft-caps and scalings differ between architectures and sit in the code around `lm_head`. So that code runs as it is,
with its base model exchanged for one that hands the hidden states through. It does not know where they came from.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.model.meta_pass import meta_pass


class LmHead:
    """Takes the model over: its base model is gone from it afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        setattr(model, model.base_model_prefix, _FinishedBody())
        self.model: Any = model

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        logits: Tensor = self.model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()


@dataclass
class _FinishedOutput(MoeModelOutputWithPast):
    """With the fields that heads hand on to their callers besides: GPT-2's and BioGPT's, and Gemma 4's."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _FinishedBody(nn.Module):
    @property
    def decoder(self) -> Self:
        """OPT's head calls this part of its base model."""
        return self

    def forward(self, *unused: Any, inputs_embeds: Tensor, **also_unused: Any) -> _FinishedOutput:
        return _FinishedOutput(last_hidden_state=inputs_embeds)


def probe_head(model: PreTrainedModel) -> None:
    """Runs the head once on the meta device; raises InvalidModel where it needs more than hidden states."""
    name = model.base_model_prefix
    base, config = model.base_model, model.config
    hidden = torch.empty(1, config.hidden_size, dtype=model.dtype, device="meta")
    try:
        with meta_pass(model):
            shape = tuple(LmHead(model).logits(hidden).shape)
    except Exception as error:  # whatever a foreign model's code raises when called so is the reason
        raise InvalidModel(f"{config.model_type} cannot be served: its head needs more than hidden states") from error
    finally:
        setattr(model, name, base)
    if shape != (1, config.vocab_size):
        raise InvalidModel(f"{config.model_type} cannot be served: its logits are {list(shape)}")
