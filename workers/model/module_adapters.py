"""Adapters for modules of transformers that cannot be served as they are.

- The attention of older models does not call transformers' attention interface.
- The forward of Mamba models reads the dtype of the head's weight, which a rank may not hold as one plain tensor.
- torch's norms on a GPU sum a row in an order that depends on the number of rows, so --deterministic replaces them.
- Some modules copy from the host or wait for the device in each forward pass, so that no CUDA graph can capture them.

The adapters change the modules of one model, not transformers' classes, because verification compares with these.
Models whose attention adds a bias to the scores (ALiBi) are refused.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.route import Routing, route
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.model.sparse_mlp import ExpertsAdapter, activation_of, unwrap_experts

# Older models. gpt_bigcode calls the interface, but holds a causal mask as a buffer.
_TYPES: Final = frozenset({"codegen", "falcon", "gpt_bigcode", "gpt_neo", "gptj"})


def has_own_attention(model_type: str) -> bool:
    """Whether the attention modules of this type call transformers' interface only after `adapt_modules`."""
    return model_type in _TYPES


# The norms of models with Mamba-2 or short convolutions, by class, and whether they multiply by the weight before they
# round. Everything else that these models compute by torch is elementwise or a look-up.
_NORMS: Final = {
    "BambaRMSNorm": False,
    "FalconH1RMSNorm": False,
    "GraniteMoeHybridRMSNorm": False,
    "Lfm2MoeRMSNorm": False,
    "Lfm2RMSNorm": False,
    "Lfm3RMSNorm": False,
    "NemotronHRMSNorm": True,
}


def has_replaceable_norms(model: nn.Module) -> bool:
    """Whether `make_rows_independent` replaces every norm of the model but those with gates, which mixers compute."""
    names = {type(module).__name__ for module in model.modules()}
    norms = {name for name in names if "Norm" in name and not name.endswith("Gated")}
    return bool(norms) and norms <= _NORMS.keys()


def make_rows_independent(model: nn.Module) -> None:
    """Let what torch computes of a row not depend on the number of rows. The weights must be loaded, linears packed.

    On a GPU our kernel computes each norm of `_NORMS`, one row by one program. lfm3's gates, of which a row has one for
    each head, get rows with a gap: torch on CPUs computes contiguous tensors in vectors across rows, and their last
    elements one by one, with other rounding.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        rounds_last = _NORMS.get(type(module).__name__)
        if rounds_last is not None and uses_triton(module.weight):
            norm = RmsNorm(module.weight.detach(), module.variance_epsilon, rounds_last=rounds_last)
            module.forward = partial(_normalise_rows, norm)
        if type(module).__name__ == "Lfm3Attention" and module.g_proj is not None:
            module.g_proj.register_forward_hook(lambda _, args, gates: functional.pad(gates, (0, 1))[..., :-1])


def _normalise_rows(norm: RmsNorm, x: Tensor) -> Tensor:
    """norm(x) for x [..., hidden]. Of two dimensions the kernel is compiled once for all numbers of rows."""
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


def adapt_modules(model: PreTrainedModel) -> None:
    """Adapt the modules of a model without weights.

    Raises InvalidModel for an older model whose config sets ALiBi.
    """
    config: Any = model.config
    is_older = has_own_attention(config.model_type)
    if is_older and getattr(config, "alibi", False):
        raise InvalidModel(
            f"{config.model_type} cannot be served: config.json sets alibi, which adds a bias to the scores; choose a "
            "model with rotary positions"
        )
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if is_older:
            _drop_causal_mask(module)
        if isinstance(module, PreTrainedModel):  # it reads token ids of every step, for which the host waits
            vars(module)["warn_if_padding_and_no_attention_mask"] = _do_nothing
        if (adapt := _ADAPTERS.get(type(module).__name__)) is not None:
            adapt(module, config)


def _do_nothing(*_: object) -> None:
    pass


def _drop_causal_mask(module: nn.Module) -> None:
    """Drop the causal mask that an older module holds as a buffer. It is not in checkpoints, and the kernels do not
    read it."""
    mask = module._buffers.get("bias")
    if mask is not None and mask.dtype == torch.bool and "bias" in module._non_persistent_buffers_set:
        module._buffers["bias"] = None


def _call_interface(
    module: nn.Module,
    config: Any,
    scaling: float,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """query, key and value [1, heads, T, dim] -> [1, heads, T, dim]. `window`: the sliding window in tokens; 0 for
    none; None if `attention_mask` defines it."""
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    out, _ = attend(
        module,
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        attention_mask if window is None else None,
        scaling=scaling,
        sliding_window=window or None,
    )
    return out.transpose(1, 2), None


def _adapt_gptj(module: Any, config: Any) -> None:
    module._attn = partial(_call_interface, module, config, 1 / module.scale_attn, None)


def _adapt_gpt_neo(module: Any, config: Any) -> None:
    module.layer_idx = module.layer_id
    window = config.window_size if module.attention_type == "local" else 0
    module._attn = partial(_call_interface, module, config, 1.0, window)


def _adapt_falcon(module: Any, config: Any) -> None:
    module.forward = partial(_falcon_forward, module, config)


def _falcon_forward(
    module: Any,
    config: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **unused: Any,
) -> tuple[Tensor, None]:
    """[1, T, hidden] -> [1, T, hidden]. Keys and values keep their num_kv_heads; transformers' own forward repeats them
    for every query head."""
    fused, dim, kv_heads = module.query_key_value(hidden_states), module.head_dim, module.num_kv_heads
    if not module.new_decoder_architecture:
        kv_heads = 1 if module.multi_query else module.num_heads
    # Slices, because an index that is a list of Python is copied from the host.
    grouped = fused.unflatten(-1, (kv_heads, -1, dim))
    parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in parts)
    rotate: Callable[..., tuple[Tensor, Tensor]] = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    out, _ = _call_interface(module, config, dim**-0.5, None, query, key, value, attention_mask)
    return module.dense(out.transpose(1, 2).flatten(2)), None


def _adapt_gemma3n_mlp(module: Any, config: Any) -> None:
    """A sparse MLP of Gemma 3n keeps the gates above mean + multiplier * deviation. transformers' code computes the
    multiplier from a tensor of the host in each forward pass."""
    if module.activation_sparsity > 0:
        share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
        multiplier = torch.distributions.Normal(0, 1).icdf(share).to(module.gate_proj.weight.dtype)
        module._gaussian_topk = partial(_above_cutoff, multiplier.item())


def _above_cutoff(multiplier: float, gates: Tensor) -> Tensor:
    cutoff = gates.mean(-1, keepdim=True) + gates.std(-1, keepdim=True, unbiased=False) * multiplier
    return functional.relu(gates - cutoff)


def _adapt_mamba(module: Any, config: Any) -> None:
    """The last norm's output gets the model's dtype, also with residual_in_fp32, and the head is only called."""
    module.backbone.norm_f.register_forward_hook(lambda norm, args, out: out.to(norm.weight.dtype))
    module.forward = partial(_call_head, module)


def _call_head(module: Any, **arguments: Any) -> CausalLMOutput:
    """A causal model's forward: its base model, then its linear."""
    hidden: Tensor = module.backbone(**arguments)[0]
    return CausalLMOutput(logits=module.lm_head(hidden))


def _drop_unread_weight(module: Any, config: Any) -> None:
    """A norm of falcon_mamba holds ones, which no code reads and no checkpoint has."""
    module._buffers["weight"] = None


def _adapt_lightning(module: Any, config: Any) -> None:
    """MiniMax's lightning attention holds its decays as buffers. The kernels read the slopes alone, which
    linear_attention.py computes, and not every checkpoint has the buffers. `activation`: its name, as in mixers."""
    module.activation = config.hidden_act
    for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
        module._buffers[name] = None


def _number_attention(module: Any, config: Any) -> None:
    """Each of zamba2's hybrid layers has an attention module of its own, with the weights of a block that several
    layers share. transformers numbers all of them -1."""
    module.shared_transformer.self_attn.layer_idx = module.mamba_decoder.layer_idx


def _adapt_zamba2_mlp(module: Any, config: Any) -> None:
    """The gates are a part of each row, so that they are contiguous in a step of one token alone. torch computes gelu
    of contiguous tensors by other code, and --deterministic needs the same bits in all steps."""
    module.act_fn.register_forward_pre_hook(lambda _, gates: (gates[0].contiguous(),))


# By the class of transformers' module.
_ADAPTERS: Final[dict[str, Callable[[Any, Any], None]]] = {
    **dict.fromkeys(("FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"), _adapt_mamba),
    "CodeGenAttention": _adapt_gptj,
    "FalconAttention": _adapt_falcon,
    "FalconMambaWeightlessRMSNorm": _drop_unread_weight,
    "GPTJAttention": _adapt_gptj,
    "GPTNeoSelfAttention": _adapt_gpt_neo,
    "Gemma3nTextMLP": _adapt_gemma3n_mlp,
    "MiniMaxLightningAttention": _adapt_lightning,
    "Zamba2HybridLayer": _number_attention,
    "Zamba2MLP": _adapt_zamba2_mlp,
}


def create_on_device(model_type: str, device: torch.device) -> AbstractContextManager[object]:
    """While it is open, models of this type create their constants on `device`.

    Gemma 3n in transformers 5.17 creates one on the host, and copies it to the device in each forward pass.
    """
    return _FilledOnDevice(device) if model_type == "gemma3n_text" and device.type != "cpu" else nullcontext()


class _FilledOnDevice(TorchFunctionMode):
    """torch.tensor of a number creates the tensor on a device, without a copy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and isinstance(args[0], int | float):
            return torch.full((), args[0], dtype=kwargs.get("dtype"), device=self._device)
        return function(*args, **kwargs)


def replace_waiting_experts(base: nn.Module, *, batch_invariant: bool) -> None:
    """Replace the experts of aria and jetmoe, whose code in transformers waits for the number of rows of each expert.

    `base`: with weights, which are not quantised.
    """
    for parent in list(base.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            kind = type(unwrap_experts(child)[0]).__name__
            if kind == "AriaExperts":
                setattr(parent, name, _pack_aria(child, parent, batch_invariant=batch_invariant))
            elif kind == "JetMoeMoE" and activation_of(child.activation) is not None:
                setattr(parent, name, _JetMoeBlock(child, batch_invariant=batch_invariant))
            elif kind == "JetMoeMoA" and child.input_linear.weight.device.type != "cpu":
                child.map = partial(_map_heads, child)
                child.reduce = partial(_reduce_heads, child)


def _pack_aria(wrapped: Any, block: Any, *, batch_invariant: bool) -> nn.Module:
    """The experts of aria's `block`. They store weights as [experts, in, out]."""
    module, reduce, first = unwrap_experts(wrapped)
    chooses = hasattr(module, "fc1")  # in transformers 5.17 the experts read the router's logits
    if chooses:
        gate_up, down = module.fc1.weight, module.fc2.weight
        num_experts, top_k = module.config.moe_num_experts, module.config.moe_topk
    else:
        gate_up, down = module.gate_up_proj, module.down_proj
        num_experts, top_k = module.num_experts, block.router.top_k
    experts = PackedExperts(
        gate_up.detach().transpose(1, 2),
        down.detach().transpose(1, 2),
        top_k=top_k,
        first=first,
        num_experts=num_experts,
        batch_invariant=batch_invariant,
    )
    adapter = ExpertsAdapter(experts, reduce)
    return _ChoosingExperts(adapter, Routing(num_experts, top_k, "softmax_of_chosen")) if chooses else adapter


class _ChoosingExperts(nn.Module):
    """Experts that choose by the router's logits."""

    def __init__(self, experts: ExpertsAdapter, routing: Routing) -> None:
        super().__init__()
        self.experts = experts
        self._routing = routing

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        out: Tensor = self.experts(hidden, *route(logits, self._routing))
        return out


class _JetMoeBlock(nn.Module):
    """The experts of a JetMoeMoE, with its router and bias. The weights have the layout of PackedExperts."""

    def __init__(self, block: Any, *, batch_invariant: bool) -> None:
        super().__init__()
        self._routing = Routing(block.router.num_experts, block.router.top_k, "softmax_of_chosen")
        self._router, self._bias = block.router.layer, block.bias
        self._experts = PackedExperts(
            block.input_linear.weight.detach(),
            block.output_linear.weight.detach(),
            top_k=self._routing.top_k,
            activation=activation_of(block.activation) or "",
            num_experts=self._routing.experts,
            batch_invariant=batch_invariant,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2).contiguous()
        ids, weights = route(self._router(rows), self._routing)
        out: Tensor = self._experts(rows, ids, weights).view_as(hidden) + self._bias
        return out


def _map_heads(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """JetMoeMoA.map without a wait for the device: the query heads of each token's experts.

    [1, T, hidden] -> ([1, T, top_k, query heads * dim], logits, (ids, weights)). It computes all experts, which is
    `num_experts / top_k` times as much, because the shapes must not depend on the choice.
    """
    rows, weight = hidden.flatten(0, -2), module.input_linear.weight
    logits = module.router.layer(rows)
    best, chosen = logits.float().topk(module.top_k, dim=-1)
    every = functional.linear(rows, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    heads = every.gather(1, chosen[..., None].expand(-1, -1, weight.shape[1]))
    return heads.view(*hidden.shape[:-1], *heads.shape[1:]), logits, (chosen, best.softmax(-1))


def _reduce_heads(module: Any, heads: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor:
    """JetMoeMoA.reduce: [1, T, top_k, query heads * dim] -> [1, T, hidden], the weighted sum of the experts' outputs.
    `choice`: of `_map_heads`."""
    (ids, weights), rows = choice, heads.flatten(0, 1)
    tokens, count, weight = len(rows), module.num_experts, module.output_linear.weight
    placed = rows.new_zeros(tokens, count, rows.shape[-1]).scatter_(1, ids[..., None].expand_as(rows), rows)
    every = torch.bmm(placed.transpose(0, 1), weight.transpose(1, 2))  # [experts, T, hidden]
    shares = weights.new_zeros(tokens, count).scatter_(1, ids, weights)
    out: Tensor = (every.float() * shares.T[..., None]).sum(0).to(heads.dtype) + module.bias
    return out.view(*heads.shape[:2], -1)
