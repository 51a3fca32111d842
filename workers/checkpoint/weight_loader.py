"""Loads this rank's slices of a checkpoint into a model on the meta device.

Checkpoint tensors become parameters through transformers' own conversion mapping. Experts, for example, are stored one
by one and held as one tensor. As far as possible a rank reads only its slices from the files.

A linear that packed_linears.py replaces gets a QuantisedWeight as its `weight`, if the checkpoint has a quantised
weight that PackedLinear can hold. A module of experts that sparse_mlp.py replaces gets QuantisedExperts, if the weights
of all its experts are stored in the same way. Other quantised weights are dequantised.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from coatcheck.kernels.layers.experts import hold_quantised
from coatcheck.kernels.layers.linear import holds_quantised, widen_scales
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight, quantise
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.held_weights import UNQUANTISED
from coatcheck.workers.checkpoint.safetensors_headers import are_stored_alike
from coatcheck.workers.distributed.tensor_slice import TensorSlice

Progress = Callable[[int, int], None]
Weight = Tensor | QuantisedWeight | QuantisedExperts

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Target:
    """A parameter and the checkpoint tensors from which it is made. A converter may make several parameters at once."""

    name: str
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)  # {the converter's source pattern: keys, in order}


@dataclass(frozen=True, slots=True)
class _Read:
    """A tensor to read. `pattern`: the converter's source pattern. `part`: the slice to read; None: all."""

    key: str
    pattern: str
    part: TensorSlice | None


@dataclass(frozen=True, slots=True)
class _PlannedTarget:
    """How a target is loaded. `slice_result`: the result of the conversion must be sliced. `is_packed`: a PackedLinear
    will hold the weight. `has_experts`: PackedExperts will hold it. `kind`: the format to which an unquantised weight
    is quantised; None: it is not."""

    target: _Target
    reads: list[_Read]
    slice_result: bool
    is_packed: bool
    has_experts: bool
    kind: CodeKind | None

    def least_bytes(self, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """A lower bound of the bytes that the rank holds, plus the bytes of a quantised weight that are read and not
        kept, such as GPTQ's g_idx. `dtype`: of the parameter."""
        bits, total = 8 * dtype.itemsize if self.kind is None else self.kind.bits, 0
        for read in self.reads:
            stored = checkpoint.slice_bytes(read.key, read.part)
            is_plain = not checkpoint.is_quantised(read.key)
            total += stored // checkpoint.dtype_of(read.key).itemsize * bits // 8 if is_plain else stored
        return total


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a rank holds. `count`: elements of all parameters. `bytes`: of quantised weights their codes and scales."""

    count: int
    bytes: int


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    slices: dict[str, TensorSlice],
    device: torch.device,
    progress: Progress | None,
    check_memory: Callable[[int], None] | None = None,
    unpackable: Collection[nn.Module] = (),
    packable_experts: Collection[nn.Module] = (),
    quantise_to: CodeKind | None = None,
    activation_quantization: str = "auto",
) -> LoadedWeights:
    """Load every parameter of `model` onto `device`, sliced as `slices` says.

    `unpackable`: linears that keep an unquantised weight (see PreparedModel). `packable_experts`: modules of experts
    that PackedExperts replaces. `quantise_to`: the format to which unquantised weights of these experts and of packable
    linears are quantised, except the head, routers and decays; None: they are not.
    `activation_quantization`: `auto`: as the checkpoint asks; `dynamic`: for all 8-bit weights; `off`: for none.
    `progress(done_bytes, total_bytes)`: called after each parameter. `check_memory(weight_bytes)`: called before the
    first, with a lower bound of the bytes of this rank.
    Raises InvalidModel if a tensor is missing or has a wrong shape.
    """
    parameters = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    targets = _match_tensors(model, checkpoint, parameters)
    tied = _resolve_ties(model, checkpoint, targets)
    planned = []
    for target in targets:
        if target.name in tied:
            continue
        owner = _owner(model, target.name)
        is_weight = type(owner) is nn.Linear and target.name.endswith(".weight")
        is_packed = is_weight and owner not in unpackable and target.name not in tied.values()
        has_experts = owner in packable_experts
        kind = quantise_to if has_experts or (is_packed and _may_quantise(model, target.name)) else None
        reads, slice_result = _plan_reads(target, checkpoint, slices)
        planned.append(_PlannedTarget(target, reads, slice_result, is_packed, has_experts, kind))
    if check_memory is not None:
        check_memory(sum(one.least_bytes(checkpoint, parameters[one.target.name].dtype) for one in planned))
    total = sum(checkpoint.slice_bytes(read.key, read.part) for one in planned for read in one.reads)
    done = count = held = 0
    loaded: set[str] = set()
    for one in planned:
        target, reads, kind = one.target, one.reads, one.kind
        dtype, owner = parameters[target.name].dtype, _owner(model, target.name)
        packed_on = device if one.is_packed or one.has_experts else None
        for name, tensor in _read_and_convert(target, reads, checkpoint, model, dtype, packed_on):
            part = slices.get(name)
            if part is not None and one.slice_result and isinstance(tensor, Tensor):
                before = (slice(None),) * part.dim
                tensor = torch.cat([tensor[(*before, slice(a, b))] for a, b in part.ranges], dim=part.dim)
            if kind is not None and isinstance(tensor, Tensor):
                tensor = (
                    _quantise_experts(owner, tensor.to(dtype), kind)
                    if one.has_experts
                    else quantise(tensor.to(dtype), kind)
                )
            if activation_quantization != "auto" and not isinstance(tensor, Tensor):
                tensor = _set_activations(tensor, activation_quantization == "dynamic")
            held += _set_parameter(model, name, tensor, parameters[name], part, device)
            count += math.prod(tensor.shape)
            loaded.add(name)
        done += sum(checkpoint.slice_bytes(read.key, read.part) for read in reads)
        if progress is not None:
            progress(done, total)
    held += _zero_absent_corrections(model, parameters, loaded, device)
    missing = sorted(set(parameters) - loaded - set(tied))
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise InvalidModel(f"{checkpoint.name}: the checkpoint lacks {shown}; fetch it again, or fix its index")
    for name, source in tied.items():
        _owner(model, name)._parameters[name.rpartition(".")[2]] = model.get_parameter(source)
    return LoadedWeights(count, held)


def _zero_absent_corrections(
    model: PreTrainedModel, parameters: dict[str, Tensor], loaded: set[str], device: torch.device
) -> int:
    """Set the biases by which experts are chosen to zero, if the checkpoint lacks them and transformers allows that.
    A.X-K1 has none, but transformers 5.17 demands them. Adds their names to `loaded` and returns their bytes."""
    held = 0
    patterns = [r"\.e_score_correction_bias$"] if model.config.model_type == "axk1" else []
    patterns += model._keys_to_ignore_on_load_missing or ()
    for name, tensor in sorted((name, parameters[name]) for name in parameters.keys() - loaded):
        if name.endswith(".e_score_correction_bias") and any(re.search(pattern, name) for pattern in patterns):
            held += _set_parameter(model, name, torch.zeros(tensor.shape, dtype=tensor.dtype), tensor, None, device)
            loaded.add(name)
    return held


def _resolve_ties(model: PreTrainedModel, checkpoint: Checkpoint, targets: list[_Target]) -> dict[str, str]:
    """{parameter without values of its own: the parameter whose values it shares}.

    The stored tensors decide, as in transformers. A head that differs from the embedding is not tied, whatever
    config.json says. If a checkpoint has only the head, the embedding shares the head's values. Each rank compares the
    whole tensors, so all ranks decide alike.
    """
    stored = {target.name: checkpoint.entries[next(iter(target.sources.values()))[0]] for target in targets}
    tied: dict[str, str] = {}
    for name, source in model.all_tied_weights_keys.items():
        if name in stored and source not in stored:
            tied[source] = name
        elif name not in stored or are_stored_alike(stored[name], stored[source]):
            tied[name] = source
        else:
            _log.warning(
                "%s: config.json ties %s to %s, but the stored tensors differ; both are used",
                checkpoint.name,
                name,
                source,
            )
    return tied


def _may_quantise(model: PreTrainedModel, name: str) -> bool:
    """Whether --quantization quantises a linear. The head, routers and the decays of states lose too much."""
    get_lm_head: Any = model.get_output_embeddings
    modules = name.split(".")[:-1]  # the router of jetmoe is a module with one linear
    return _owner(model, name) is not get_lm_head() and not UNQUANTISED.intersection(modules)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _match_tensors(model: PreTrainedModel, checkpoint: Checkpoint, parameters: dict[str, Tensor]) -> list[_Target]:
    """Find the parameter of every checkpoint tensor, by transformers' renamings and converters."""
    mapping = get_model_conversion_mapping(model)
    if checkpoint.config.get("model_type") == "qwen3_vl_moe":  # stores its experts transposed
        mapping += get_checkpoint_conversion_mapping("qwen3_vl_moe") or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets: dict[str, _Target] = {}
    unused = []
    for key in sorted(checkpoint.entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
        if name not in parameters and key in parameters:
            name, pattern = key, None
        if name not in parameters:
            unused.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        index = _EXPERT.search(key)
        if index and converter and _stacks_experts(converter) and int(index[1]) >= parameters[name].shape[0]:
            continue  # a weight of an identity expert of longcat_flash, which no code reads
        target = targets.setdefault(name, _Target(name, converter))
        target.sources.setdefault(pattern or key, []).append(key)
    if checkpoint.skipped:
        _log.info(
            "%s: only the text model is loaded; %d tensors of its vision and other towers are skipped",
            checkpoint.name,
            checkpoint.skipped,
        )
    if unused:  # heads for other tasks, buffers of older versions, or a config.json with too few layers
        _log.warning("%s: %d tensors are not used, the first is %s", checkpoint.name, len(unused), unused[0])
    return list(targets.values())


def _plan_reads(target: _Target, checkpoint: Checkpoint, slices: dict[str, TensorSlice]) -> tuple[list[_Read], bool]:
    """(the reads, whether the result of the conversion must be sliced).

    For stacking and concatenation only this rank's slices are read, because both commute with slicing. Other
    conversions read whole tensors.
    """
    part = slices.get(target.name)
    pairs = [(pattern, key) for pattern, keys in target.sources.items() for key in keys]
    if target.converter is None:
        return [_Read(key, pattern, part) for pattern, key in pairs], False
    operations = target.converter.operations
    if part is None or not all(isinstance(op, (MergeModulelist, Concatenate)) for op in operations):
        return [_Read(key, pattern, None) for pattern, key in pairs], part is not None
    stacked_dims = [op.dim for op in operations if isinstance(op, MergeModulelist)]
    joined_dims = [op.dim for op in operations if isinstance(op, Concatenate)]
    if stacked_dims == [part.dim]:  # the slice is over experts, not inside them
        picked = [(p, keys[start:stop]) for p, keys in target.sources.items() for start, stop in part.ranges]
        return [_Read(key, pattern, None) for pattern, keys in picked for key in keys], False
    if any(dim >= part.dim for dim in stacked_dims):
        return [_Read(key, pattern, None) for pattern, key in pairs], True
    source_dim = part.dim - len(stacked_dims)
    reads, start = [], 0
    for pattern in target.converter.source_patterns:
        keys = target.sources.get(pattern, [])
        local = part
        if keys and part.dim in joined_dims:  # each source has a range of the concatenated dimension
            stop = start + checkpoint.entries[keys[0]].shape[source_dim]
            local, start = part.intersect(start, stop), stop
        if local.ranges:  # a source may have only rows of other ranks
            reads += [_Read(key, pattern, TensorSlice(source_dim, local.ranges)) for key in keys]
    return reads, False


def _read_and_convert(
    target: _Target,
    reads: list[_Read],
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    dtype: torch.dtype,
    packed_on: torch.device | None,
) -> Iterator[tuple[str, Weight]]:
    """(parameter name, tensor) for each parameter to which `target` is converted. `dtype`: dtype of the parameter.
    `packed_on`: the device on which a PackedLinear or PackedExperts will hold it; None if neither will."""
    if packed_on is not None:
        quantised = _read_quantised(target, reads, checkpoint, dtype, packed_on)
        if quantised is not None:
            yield target.name, quantised
            return
    if target.converter is None:
        yield target.name, checkpoint.read(reads[0].key, reads[0].part, dtype)
        return
    converter = deepcopy(target.converter)  # a converter keeps the tensors that it has collected
    for read in reads:
        tensor = checkpoint.read(read.key, read.part, dtype)
        converter.collected_tensors[read.pattern].append(tensor)  # type: ignore[arg-type]  # tensors are fine too
    for name, tensor in converter.convert(target.name, model=model, config=model.config).items():
        yield name, tensor[0] if isinstance(tensor, list) else tensor


def _read_quantised(
    target: _Target, reads: list[_Read], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> QuantisedWeight | QuantisedExperts | None:
    """The quantised weight; None if it is stored unquantised, or if the kernels cannot hold it on `device`."""
    if target.converter is None:
        weight = checkpoint.read_quantised(reads[0].key, reads[0].part, dtype)
        if isinstance(weight, QuantisedExperts):
            return hold_quantised(weight, device)
        return widen_scales(weight, device) if weight is not None and holds_quantised(weight, device) else None
    if not _stacks_experts(target.converter):
        return None
    by_pattern: dict[str, list[QuantisedWeight]] = {pattern: [] for pattern in target.converter.source_patterns}
    for read in reads:
        weight = checkpoint.read_quantised(read.key, read.part, dtype)
        if not isinstance(weight, QuantisedWeight):
            return None
        by_pattern[read.pattern].append(weight)
    parts = [part for expert in zip(*by_pattern.values(), strict=True) for part in expert]  # gate and up of each expert
    experts = QuantisedExperts.of(parts, len(parts) // len(by_pattern)) if parts else None
    return None if experts is None else hold_quantised(experts, device)


def _stacks_experts(converter: WeightConverter) -> bool:
    """Whether the result has the rows of all sources of expert 0, then those of expert 1, and so on."""
    dims = {type(operation): getattr(operation, "dim", None) for operation in converter.operations}
    return dims in ({MergeModulelist: 0}, {MergeModulelist: 0, Concatenate: 1})


def _quantise_experts(module: Any, weights: Tensor, kind: CodeKind) -> Weight:
    """Quantise the weights of experts. Biases of experts, which have fewer dimensions, are returned unchanged."""
    if weights.dim() != 3:
        return weights
    if getattr(module, "is_transposed", False):
        weights = weights.transpose(1, 2)
    return QuantisedExperts(weights.shape[0], quantise(weights.flatten(0, 1), kind))


def _set_activations(
    weight: QuantisedWeight | QuantisedExperts, is_quantised: bool
) -> QuantisedWeight | QuantisedExperts:
    """The weight with `quantises_activations` set to `is_quantised`, or to False if its codes do not have 8 bits."""
    if isinstance(weight, QuantisedExperts):
        return replace(weight, stacked=_with_activations(weight.stacked, is_quantised))
    return _with_activations(weight, is_quantised)


def _with_activations(weight: QuantisedWeight, is_quantised: bool) -> QuantisedWeight:
    return replace(weight, quantises_activations=is_quantised and weight.kind.bits == 8)


def _set_parameter(
    model: PreTrainedModel,
    name: str,
    tensor: Weight,
    empty: Tensor,
    part: TensorSlice | None,
    device: torch.device,
) -> int:
    """Replace the meta tensor `empty` by `tensor` on `device`. Returns its bytes."""
    expected = tuple(empty.shape) if part is None else part.sliced_shape(tuple(empty.shape))
    shape: tuple[int, ...] = tuple(tensor.shape)
    if isinstance(tensor, QuantisedExperts) and getattr(_owner(model, name), "is_transposed", False):
        shape = (shape[0], shape[2], shape[1])
    if shape != expected:
        raise InvalidModel(
            f"tensor {name} has shape {list(shape)}, but config.json implies {list(expected)}: "
            "the checkpoint and its config.json do not belong together"
        )
    owner, leaf = _owner(model, name), name.rpartition(".")[2]
    if not isinstance(tensor, Tensor):
        del owner._parameters[leaf]
        setattr(owner, leaf, tensor.to(device))
    else:
        # Copied out of the memory-mapped file. Otherwise an eviction from the page cache would slow steps down.
        tensor = tensor.to(device=device, dtype=empty.dtype).clone(memory_format=torch.contiguous_format)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    if isinstance(owner, nn.Linear) and leaf == "weight":
        owner.out_features, owner.in_features = shape
    return tensor.nbytes


def _owner(model: PreTrainedModel, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
