"""AttentionProbe: finds each layer's attention parameters, and checks that tokens mix in attention only.

A paged server computes any mixture of chunks and decodes in one pass. That is correct only for a model in which a
token's result depends on nothing but its id, its position, and what attention reads for it. The probe runs the model's
own code a few times with stand-in weights (stand_in.py), and raises InvalidModel with the reason if

- a layer does not call the attention function, calls it twice, or uses a feature that our kernels lack,
- its mask is neither causal nor a sliding window (mask_pattern.py),
- a token's queries, keys, values or result change with its neighbours: a convolution, a recurrent or delayed state, a
  scale chosen by the longest position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention import dummy_weights as stand_in
from coatcheck.workers.attention.attention import NAME, AttentionCall, layer_of, scale_of
from coatcheck.workers.attention.mask_probe import MaskRecorder, UnknownPattern, window_of

_PROBE: Final = "coatcheck_probe"  # like NAME not in the mask interface: no mask is built
_MASKED_PROBE: Final = "coatcheck_masked_probe"
# Arguments of the attention function that change nothing in what it computes here.
_HARMLESS: Final = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
_TOLERANCE: Final = 1e-5  # relative to the largest value; rounding is below 1e-6, an effect of other tokens far above
_MIXES: Final = (
    "computes a token's result from other tokens outside of attention; only models whose tokens meet in attention "
    "alone are supported"
)


class _Refused(Exception):
    """Carries the reason out of the model's forward pass."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The input of a pass: int64 ids and positions, [tokens] each."""

    ids: Tensor
    positions: Tensor


@dataclass(slots=True)
class _Pass:
    """One forward pass as its attention layers saw it."""

    names: dict[nn.Module, str]
    tokens: int
    masks: MaskRecorder | None = None
    limit: int = 0  # masks are evaluated at positions below it
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # by layer: queries, keys and values, [tokens, features]


def probe_attention(model: PreTrainedModel, max_model_len: int | None = None) -> list[AttentionCall]:
    """The attention parameters of each layer, in layer order. `model` has its parameters on meta.

    `max_model_len`: masks are checked up to that context; None takes the config's. Raises InvalidModel, with the
    reason, for a model that cannot be served.
    """
    AttentionInterface.register(_PROBE, _record)
    AttentionInterface.register(_MASKED_PROBE, _record)
    stand_in.register()
    config: Any = model.config
    limit = max_model_len or getattr(config, "max_position_embeddings", None) or 4096
    try:
        with stand_in.stand_in_weights(model):
            calls = _read_calls(model, limit)
            _check_mixing(model, limit)
    except stand_in.TokensMixed as mixed:
        raise InvalidModel(f"{config.model_type} cannot be served: {mixed} {_MIXES}") from None
    except _Refused as refused:
        raise InvalidModel(f"{config.model_type} cannot be served: {refused}") from None
    except Exception as error:  # whatever the model's code raises is the reason
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(
            f"{config.model_type} cannot be served: it does not take flattened tokens without a cache ({reason[:300]})"
        ) from error
    finally:
        config._attn_implementation = NAME
    return calls


def _read_calls(model: PreTrainedModel, limit: int) -> list[AttentionCall]:
    """The attention parameters, from a pass of one sequence with transformers' own masks."""
    tokens = 4
    masks = MaskRecorder()
    AttentionMaskInterface.register(_MASKED_PROBE, masks.make)
    seen = _Pass({module: name for name, module in model.named_modules()}, tokens, masks, limit)
    model.config._attn_implementation = _MASKED_PROBE
    _run(model, _ids(model, tokens), torch.arange(tokens), seen)
    expected = model.config.get_text_config().num_hidden_layers
    missing = [str(layer) for layer in range(expected) if layer not in seen.calls]
    if missing:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise _Refused(f"layers {named} attend, or keep a state, outside of transformers' attention interface")
    return [seen.calls[layer] for layer in range(expected)]


def _check_mixing(model: PreTrainedModel, limit: int) -> None:
    """Raises _Refused if a token's result changes with the other tokens of the pass."""
    model.config._attn_implementation = _PROBE
    # Three sequences side by side, and two tokens at the end of the longest context.
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, limit - 2, 0, limit - 1]).clamp(0, limit - 1)
    ids = _ids(model, len(positions))
    whole = _Tokens(ids, positions)
    # In the second pass the tokens in odd rows have other ids and smaller positions; those in even rows must not
    # change.
    rows = torch.arange(len(ids))
    odd = rows % 2 == 1
    changed = _Tokens(torch.where(odd, ids.roll(1), ids), torch.where(odd, (positions + 3) % min(7, limit), positions))
    _compare(model, whole, changed, rows[::2], rows[::2])
    # A few of the tokens, in another order: no result may depend on a token's row.
    for few in (torch.tensor([10, 4, 0, 7, 2]), torch.tensor([11, 9])):
        _compare(model, whole, _Tokens(ids[few], positions[few]), few, rows[: len(few)])


def _compare(model: PreTrainedModel, first: _Tokens, second: _Tokens, rows: Tensor, same_rows: Tensor) -> None:
    """Raises _Refused if row rows[i] of the first pass differs from row same_rows[i] of the second for some i."""
    values, others = _observe(model, first), _observe(model, second)
    if all(_are_equal(values[what][rows], others[what][same_rows]) for what in values):
        return
    where = _mixing_module(model, first, second, rows, same_rows)
    raise _Refused(f"{where} (it has a recurrent or delayed state, or counts positions over the batch) {_MIXES}")


def _mixing_module(model: PreTrainedModel, first: _Tokens, second: _Tokens, rows: Tensor, same_rows: Tensor) -> str:
    """The name of the innermost module whose outputs differ although its inputs are equal."""
    ours, theirs = _ends_of_modules(model, first), _ends_of_modules(model, second)
    for module, (before, after) in ours.items():
        same_before, same_after = theirs[module]
        if _are_equal(before[rows], same_before[same_rows]) and not _are_equal(after[rows], same_after[same_rows]):
            return module
    return "one of its modules"


def _ends_of_modules(model: PreTrainedModel, tokens: _Tokens) -> dict[str, tuple[Tensor, Tensor]]:
    """By module, inner ones first: its first input and first output that have a row for every token, [tokens, features]
    each."""
    names = {module: f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    ends: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = _rows(tokens, (*args, *kwargs.values()))
        after = _rows(tokens, output if isinstance(output, tuple) else (output,))
        if before is not None and after is not None:
            ends.setdefault(names[module], (before, after))

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in names]
    try:
        _observe(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return ends


def _rows(tokens: _Tokens, values: tuple[Any, ...]) -> Tensor | None:
    count = len(tokens.ids)
    for value in values:
        if isinstance(value, Tensor) and value.shape[:2] == (1, count):
            row: Tensor = value[0].reshape(count, -1)
            return row
    return None


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= _TOLERANCE * ours.abs().max())


def _observe(model: PreTrainedModel, tokens: _Tokens) -> dict[str, Tensor]:
    """The inputs of every layer's attention and the last hidden states, [tokens, features] each."""
    seen = _Pass({module: name for name, module in model.named_modules()}, len(tokens.ids))
    hidden = _run(model, tokens.ids, tokens.positions, seen)
    return {str(layer): inputs for layer, inputs in seen.inputs.items()} | {"hidden": hidden[0]}


def _ids(model: PreTrainedModel, count: int) -> Tensor:
    size: int = model.config.vocab_size
    return (torch.arange(count) * 7 + 3) % size


def _run(model: PreTrainedModel, ids: Tensor, positions: Tensor, seen: _Pass) -> Tensor:
    base: Callable[..., Any] = model.base_model
    out = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, probed=seen)
    hidden: Tensor = out.last_hidden_state
    if hidden.shape[:2] != (1, len(ids)):
        raise _Refused(f"it computes {hidden.shape[1]} hidden states for {len(ids)} tokens")
    return hidden


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probed: _Pass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replaces attention: records the layer's parameters, and returns for each token a function of its own q, k and
    v."""
    if probed is None:
        raise _Refused("its layers do not hand our arguments down to attention")
    strange = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if strange:
        raise _Refused(f"its attention takes {', '.join(strange)}, which our kernels do not")
    if not getattr(module, "is_causal", True):
        raise _Refused("its attention is not causal")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise _Refused(f"its keys and values differ in shape ({list(key.shape)}, {list(value.shape)})")
    if query.shape[2] != probed.tokens or key.shape[2] != probed.tokens:
        raise _Refused(f"its attention gets {key.shape[2]} keys of {probed.tokens} tokens")
    try:
        layer = layer_of(module)
        window = _window(probed, attention_mask, sliding_window, query.shape[1])
    except (UnknownPattern, ValueError) as reason:
        raise _Refused(str(reason)) from None
    if layer in probed.calls:
        raise _Refused(f"layer {layer} attends more than once")
    probed.calls[layer] = AttentionCall(
        module=probed.names[module],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=scale_of(scaling, query),
        sliding_window=window,
        softcap=softcap or 0.0,
        has_sinks=s_aux is not None,
    )
    probed.inputs[layer] = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (query, key, value)], dim=1)
    groups = query.shape[1] // key.shape[1]
    own = query + (key - 0.5 * value).repeat_interleave(groups, dim=1)
    return own.transpose(1, 2), None


def _window(probed: _Pass, mask: Tensor | None, named: int | None, heads: int) -> int:
    """The layer's sliding window: the mask's, because transformers computes with that; without a mask `named`."""
    named = named or 0
    if mask is None:
        return named
    if probed.masks is None:
        raise UnknownPattern("its attention adds a bias or a mask of its own to the scores")
    found = window_of(probed.masks.function_of(mask), probed.limit, heads)
    return named if not found and named >= probed.limit else found
