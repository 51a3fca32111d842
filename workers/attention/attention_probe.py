"""Finds each layer's attention parameters by running the model's own code, and refuses models that cannot be served.

transformers has no description of a layer's attention: some models have the sliding window only in the mask, some
scale the scores, some add a bias. `probe_attention` therefore replaces the attention function, runs a few tokens
through the model with dummy weights (dummy_weights.py), and records the arguments of each layer's call.

A paged server computes prefill chunks and decodes of many requests in one pass over flattened tokens. That is correct
only if a token's result depends on nothing but its id, its position, and the keys and values that attention reads for
it. So the probe also compares passes that differ in the other tokens. It raises InvalidModel with the reason if

- a layer does not call the attention function, calls it twice, or uses a feature that the kernels lack,
- a layer's mask is neither causal nor a sliding window (mask_probe.py),
- a token's queries, keys, values or hidden state change with the other tokens of the pass: a convolution, a recurrent
  or delayed state, a RoPE scale chosen by the longest position.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.attention import NAME, AttentionLayer, layer_index
from coatcheck.workers.attention.dummy_weights import TokensMixed, use_dummy_weights
from coatcheck.workers.attention.latent_description import LatentDescription
from coatcheck.workers.attention.mask_probe import MaskRecorder, UnsupportedMask, find_sliding_window
from coatcheck.workers.attention.state_layers import (
    find_mlp_layers,
    find_state_layers,
    has_output_gate,
    without_states,
)

_PROBE: Final = "coatcheck_probe"  # not in the mask interface, as NAME is not, so that no mask is built
_MASKED_PROBE: Final = "coatcheck_masked_probe"
# Arguments of the attention function that do not change its result here.
_IGNORED: Final = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
# Relative to the largest value. Rounding stays below 1e-6; an effect of other tokens is far larger than 1e-5.
_TOLERANCE: Final = 1e-5
_MIXES: Final = (
    "computes a token's result from other tokens outside of attention; only models whose tokens interact in attention "
    "alone are supported"
)


class _Unsupported(Exception):
    """The model cannot be served; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The input of a pass: int64 ids and positions, [tokens] each."""

    ids: Tensor
    positions: Tensor


@dataclass(slots=True)
class _Recording:
    """The arguments with which the attention layers of one pass were called. `max_model_len`: see probe_attention."""

    names: dict[nn.Module, str]
    num_tokens: int
    max_model_len: int
    masks: MaskRecorder | None = None  # None in a pass without masks
    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # by layer: queries, keys and values, [tokens, features]
    stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer with its own keys and values


_recording: ContextVar[_Recording] = ContextVar("probe_recording")  # of the pass that runs


def probe_attention(model: PreTrainedModel, max_model_len: int | None = None) -> list[AttentionLayer]:
    """The parameters of the attention layers, in layer order, with the heads of all ranks. Layers that keep a state
    (state_layers.py) and layers without attention are left out. The list is empty for a model without attention.

    `model`: its parameters are on the meta device. Its buffers, config and parameters are unchanged afterwards.
    `max_model_len`: masks are checked up to this length; None: config.json's max_position_embeddings.
    Raises InvalidModel with the reason if the model cannot be served.
    """
    AttentionInterface.register(_PROBE, _record_attention)
    AttentionInterface.register(_MASKED_PROBE, _record_attention)
    config: Any = model.config
    length = max_model_len or getattr(config, "max_position_embeddings", None) or 4096
    try:
        with use_dummy_weights(model), without_states(model):
            layers = _read_layers(model, length)
            _check_tokens_are_independent(model, length)
    except TokensMixed as mixed:
        raise InvalidModel(f"{config.model_type} cannot be served: {mixed} {_MIXES}") from None
    except _Unsupported as refusal:
        raise InvalidModel(f"{config.model_type} cannot be served: {refusal}{_chunk_advice(config, length)}") from None
    except Exception as error:  # the model's code may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(
            f"{config.model_type} cannot be served: its code does not take flattened tokens without a cache "
            f"({reason[:300]})"
        ) from error
    finally:
        config._attn_implementation = NAME
    return layers


def _chunk_advice(config: Any, max_model_len: int) -> str:
    """Advice for an error, if layers attend in chunks: within the first chunk the mask is causal. Else ""."""
    chunk = getattr(config, "attention_chunk_size", None)
    if not isinstance(chunk, int) or max_model_len <= chunk:
        return ""
    return f"; set --max-model-len to at most {chunk}, its attention_chunk_size"


def _read_layers(model: PreTrainedModel, max_model_len: int) -> list[AttentionLayer]:
    """Run one sequence with transformers' own masks, and return the parameters with which each layer called
    attention."""
    num_tokens = 4
    masks = MaskRecorder()
    AttentionMaskInterface.register(_MASKED_PROBE, masks.make_mask)
    model.config._attn_implementation = _MASKED_PROBE
    recording = _Recording(_module_names(model), num_tokens, max_model_len, masks)
    _run(model, _Tokens(_some_ids(model, num_tokens), torch.arange(num_tokens)), recording)
    others = {state.spec.layer for state in find_state_layers(model)} | find_mlp_layers(model)
    count = model.config.get_text_config().num_hidden_layers
    missing = [str(layer) for layer in range(count) if layer not in recording.layers and layer not in others]
    if missing:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise _Unsupported(f"layers {named} attend, or keep a state, outside of transformers' attention interface")
    if not recording.layers and not others:
        raise _Unsupported("none of its layers has attention or keeps a state")
    return [recording.layers[layer] for layer in sorted(recording.layers)]


def _check_tokens_are_independent(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise _Unsupported if a token's result changes with the other tokens of the pass."""
    model.config._attn_implementation = _PROBE
    last = max_model_len - 1
    # Three sequences side by side, and two tokens at the end of the longest context.
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, last - 1, 0, last]).clamp(0, last)
    ids = _some_ids(model, len(positions))
    tokens = _Tokens(ids, positions)
    # Other ids and smaller positions in the odd rows must not change the even rows.
    rows = torch.arange(len(ids))
    odd = rows % 2 == 1
    changed = _Tokens(
        torch.where(odd, ids.roll(1), ids), torch.where(odd, (positions + 3) % min(7, max_model_len), positions)
    )
    results = _token_results(model, tokens)
    _compare_rows(model, tokens, results, changed, rows[::2], rows[::2])
    # The results of a few tokens in another order must not change either: no result may depend on a token's row.
    for few in (torch.tensor([10, 4, 0, 7, 2]), torch.tensor([11, 9])):
        _compare_rows(model, tokens, results, _Tokens(ids[few], positions[few]), few, rows[: len(few)])


def _compare_rows(
    model: PreTrainedModel,
    first: _Tokens,
    results: dict[str, Tensor],
    second: _Tokens,
    rows: Tensor,
    same_rows: Tensor,
) -> None:
    """Raise _Unsupported if for some i row rows[i] of the pass over `first` differs from row same_rows[i] of the pass
    over `second`. `results`: of the pass over `first`."""
    others = _token_results(model, second)
    if all(_are_equal(results[what][rows], others[what][same_rows]) for what in results):
        return
    # Run both again, to name the innermost module whose outputs differ although its inputs are equal.
    name = "one of its modules"
    modules, other_modules = _module_inputs_and_outputs(model, first), _module_inputs_and_outputs(model, second)
    for module, (before, after) in modules.items():
        same_before, same_after = other_modules[module]
        if _are_equal(before[rows], same_before[same_rows]) and not _are_equal(after[rows], same_after[same_rows]):
            name = module
            break
    raise _Unsupported(f"{name} (it has a recurrent or delayed state, or counts positions over the batch) {_MIXES}")


def _token_results(model: PreTrainedModel, tokens: _Tokens) -> dict[str, Tensor]:
    """The inputs of every layer's attention and the last hidden states, [tokens, features] each."""
    recording = _Recording(_module_names(model), len(tokens.ids), 0)
    hidden = _run(model, tokens, recording)
    return {str(layer): inputs for layer, inputs in recording.inputs.items()} | {"hidden": hidden[0]}


def _module_inputs_and_outputs(model: PreTrainedModel, tokens: _Tokens) -> dict[str, tuple[Tensor, Tensor]]:
    """{module: (input, output)}, [tokens, features] each, inner modules first. They are the module's first input and
    first output that have a row for every token."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = _token_rows(tokens, (*args, *kwargs.values()))
        after = _token_rows(tokens, output if isinstance(output, tuple) else (output,))
        if before is not None and after is not None:
            found.setdefault(f"{names[module]} ({type(module).__name__})", (before, after))

    names = _module_names(model)
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in names]
    try:
        _token_results(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _token_rows(tokens: _Tokens, values: tuple[Any, ...]) -> Tensor | None:
    """The first of `values` with shape [1, tokens, ...], as [tokens, features]."""
    count = len(tokens.ids)
    for value in values:
        if isinstance(value, Tensor) and value.shape[:2] == (1, count):
            rows: Tensor = value[0].reshape(count, -1)
            return rows
    return None


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= _TOLERANCE * ours.abs().max())


def _module_names(model: PreTrainedModel) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _some_ids(model: PreTrainedModel, count: int) -> Tensor:
    size: int = model.config.vocab_size
    return (torch.arange(count) * 7 + 3) % size


def _run(model: PreTrainedModel, tokens: _Tokens, recording: _Recording) -> Tensor:
    """The last hidden states, [1, tokens, features]."""
    base: Callable[..., Any] = model.base_model
    token = _recording.set(recording)
    try:
        out = base(input_ids=tokens.ids[None], position_ids=tokens.positions[None], use_cache=False)
    finally:
        _recording.reset(token)
    hidden: Tensor = out.last_hidden_state
    if hidden.shape[:2] != (1, len(tokens.ids)):
        raise _Unsupported(f"it computes {hidden.shape[1]} hidden states for {len(tokens.ids)} tokens")
    return hidden


def _record_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of a probe: records the layer's parameters, and computes each token's output from its own
    q, k and v alone."""
    recording = _recording.get()
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _IGNORED)
    if unknown:
        raise _Unsupported(f"its attention takes {', '.join(unknown)}, which our kernels do not support")
    if not getattr(module, "is_causal", True):
        raise _Unsupported("its attention is not causal")
    latent = LatentDescription.of(module)
    rank, rope_dim = (0, 0) if latent is None else (latent.rank, latent.rope)
    has_known_sizes = key.shape[:3] == value.shape[:3] and value.shape[-1] <= key.shape[-1] == query.shape[-1]
    if not rope_dim and not has_known_sizes:
        raise _Unsupported(
            f"its attention has queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}; "
            "keys must be as long as queries, and values as many as keys and no longer"
        )
    if query.shape[2] != recording.num_tokens or key.shape[2] != recording.num_tokens:
        raise _Unsupported(f"its attention gets {key.shape[2]} keys for {recording.num_tokens} tokens")
    try:
        layer = layer_index(module)
        window = _read_window(recording, attention_mask, sliding_window or 0, query.shape[1])
    except (UnsupportedMask, ValueError) as reason:
        raise _Unsupported(str(reason)) from None
    if layer in recording.layers:
        raise _Unsupported(f"layer {layer} calls attention more than once")
    recording.layers[layer] = AttentionLayer(
        module=recording.names[module],
        num_heads=query.shape[1],
        num_kv_heads=1 if rope_dim else key.shape[1],
        head_dim=rank + rope_dim if rope_dim else query.shape[3],
        v_head_dim=0 if rope_dim else None,
        rope_head_dim=rope_dim,
        unpadded_v_dim=0 if rope_dim or value.shape[3] == key.shape[3] else value.shape[3],
        kv_source=_find_kv_source(recording, layer, key, value),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=window,
        softcap=softcap or 0.0,
        has_sinks=s_aux is not None,
        has_gate=has_output_gate(module),
    )
    recording.inputs[layer] = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (query, key, value)], dim=1)
    if rope_dim:
        return (value * (1 + torch.tanh((query * key).sum(-1, keepdim=True)))).transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    size = value.shape[-1]
    own = query[..., :size] + (key[..., :size] - 0.5 * value).repeat_interleave(groups, dim=1)
    return own.transpose(1, 2), None


def _find_kv_source(recording: _Recording, layer: int, key: Tensor, value: Tensor) -> int | None:
    """The earlier layer that has called attention with these same tensors. If there is none, record the tensors as the
    layer's own, and return None."""
    for source, (its_key, its_value) in recording.stored.items():
        if key is its_key and value is its_value:
            return source
    recording.stored[layer] = key, value
    return None


def _read_window(recording: _Recording, mask: Tensor | None, argument: int, num_heads: int) -> int:
    """The layer's sliding window. With a mask it is the mask's, because transformers' own attention applies the mask;
    without one it is `argument`."""
    if mask is None:
        return argument
    if recording.masks is None:
        raise UnsupportedMask("its attention adds a bias or its own mask to the scores")
    window = find_sliding_window(recording.masks.mask_function_of(mask), recording.max_model_len, num_heads)
    return argument if not window and argument >= recording.max_model_len else window
