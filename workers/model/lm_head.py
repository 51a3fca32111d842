"""LmHead: a causal model's last step, from the hidden states after the final norm to logits.

The model's own code around `lm_head` runs unchanged, because soft-caps and logit scaling differ between architectures.
The base model is replaced by a module that returns the given hidden states. If a trial call shows that the code only
calls the linear, later calls run the linear alone.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from coatcheck.kernels.sampling.greedy import widen_logits
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.dummy_weights import use_dummy_weights
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.parallel_layers import ParallelLmHead


class LmHead:
    """Takes the base model out of `model`, and keeps the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        get_linear: Any = model.get_output_embeddings
        linear = get_linear()
        setattr(model, model.base_model_prefix, _PassThroughBody(getattr(model, model.base_model_prefix)))
        self.model: Any = model
        self._linear_name = next((name for name, module in model.named_modules() if module is linear), None)
        self._only_linear: nn.Module | None = None
        self._is_probed = False
        parallel = [module for module in model.modules() if isinstance(module, ParallelLmHead)]
        self._parallel = parallel[0] if parallel else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        if not self._is_probed:
            self._only_linear, self._is_probed = self._find_only_linear(hidden.dtype), True
        if (linear := self._only_linear) is not None:
            only: Tensor = linear(hidden)
            return widen_logits(only)
        logits: Tensor = self.model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return widen_logits(logits[0])

    def shard_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, rows], the logits of this rank's rows of the vocabulary."""
        assert self._parallel is not None
        self._parallel.gathers = False
        try:
            return self.logits(hidden)
        finally:
            self._parallel.gathers = True

    @torch.inference_mode()
    def can_shard(self, communicator: Communicator, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `shard_logits` has the same bits as `logits`, by a trial with hidden states of `dtype` on `device`. A
        collective: every rank calls this.

        It has if the head's code changes each logit alone, as soft-caps and scales do. It has not if that code reads
        several logits, or a token's id.
        """
        if self._parallel is None:
            return False
        hidden = torch.linspace(-2, 2, self.model.config.hidden_size, dtype=dtype, device=device)[None]
        whole, first = self.logits(hidden), communicator.rank * self._parallel.part
        try:
            own = self.shard_logits(hidden)
            is_equal = torch.equal(own, whole[:, first : first + own.shape[1]])
        except Exception:  # the model's code may raise anything
            is_equal = False
        return communicator.all_reduce_min([int(is_equal)]) == [1]

    def _find_only_linear(self, dtype: torch.dtype) -> nn.Module | None:
        """The linear, if the model's code passes the hidden states to it and returns its result unchanged. Else None.

        transformers' code around the linear of a llama takes 0.2 ms of a decode step. For one trial call a module that
        records its input replaces the linear.
        """
        if self._linear_name is None:
            return None
        parent, _, name = self._linear_name.rpartition(".")
        owner, config = self.model.get_submodule(parent), self.model.config
        linear: nn.Module = getattr(owner, name)
        sizes = (config.hidden_size, config.vocab_size)
        # The range of the logits exceeds any soft-cap, so a soft-cap would change some.
        hidden, result = (torch.linspace(-99, 88, 2 * size, device="cpu").view(1, 2, size).to(dtype) for size in sizes)
        recorder = _Recorder(result)
        setattr(owner, name, recorder)
        try:
            with torch.inference_mode():
                logits = self.model(inputs_embeds=hidden.clone(), use_cache=False).logits
        except Exception:  # such as a bias on another device
            return None
        finally:
            setattr(owner, name, linear)
        returns_result = logits.data_ptr() == recorder.result.data_ptr() and torch.equal(logits, result)
        passes_hidden = len(recorder.inputs) == 1 and torch.equal(recorder.inputs[0], hidden)
        return linear if returns_result and passes_hidden else None


class _Recorder(nn.Module):
    """Records copies of its inputs. Returns the same copy of `result` in every call."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result.clone()
        self.inputs: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.inputs.append(hidden.clone())
        return self.result


@dataclass
class _BodyOutput(MoeModelOutputWithPast):
    """A base model's output, with the fields that the heads of GPT-2, BioGPT and Gemma 4 copy from it."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _PassThroughBody(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        """Copies the int and float attributes of `base`, because the head of falcon_h1 reads one."""
        super().__init__()
        for name, value in vars(base).items():
            if type(value) in (int, float):
                setattr(self, name, value)

    @property
    def decoder(self) -> Self:
        """OPT's head calls `decoder` of its base model."""
        return self

    def forward(self, *unused: Any, inputs_embeds: Tensor, **also_unused: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def probe_head(model: PreTrainedModel) -> None:
    """Run the head once with dummy weights. Raises InvalidModel if it needs more than hidden states."""
    name = model.base_model_prefix
    base, config = model.base_model, model.config
    try:
        with use_dummy_weights(model):
            shape = tuple(LmHead(model).logits(torch.zeros(1, config.hidden_size)).shape)
    except Exception as error:  # the model's code may raise anything
        raise InvalidModel(f"{config.model_type} cannot be served: its head needs more than hidden states") from error
    finally:
        setattr(model, name, base)
    if shape != (1, config.vocab_size):
        raise InvalidModel(
            f"{config.model_type} cannot be served: its logits for one token have shape {list(shape)} instead of "
            f"[1, {config.vocab_size}]"
        )
