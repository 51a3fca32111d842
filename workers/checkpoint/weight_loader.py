"""Weights: fills a model that stands on the meta device with this rank's slices of a checkpoint.

Checkpoint keys become parameter names through transformers' own conversion mapping (experts are stored one by one and
held as one tensor, for example). Where the conversion only stacks and joins, the cut is carried back to the sources
and nothing else is read; other conversions read their sources whole and cut the result. It does not know why a
parameter is cut.
"""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.distributed.tensor_slice import TensorSlice

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Target:
    """One parameter (or several, which one converter makes) and the checkpoint tensors that it is made of."""

    name: str
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)  # converter's source pattern -> keys, in order


@dataclass(frozen=True, slots=True)
class _Read:
    """One slice to read: `pattern` is the converter's, `cut` the source's own."""

    key: str
    pattern: str
    cut: TensorSlice | None


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    cuts: dict[str, TensorSlice],
    device: torch.device,
    progress: Progress | None,
) -> int:
    """Returns the bytes that this rank now holds. Raises InvalidModel for tensors missing or of a wrong shape."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    tied: dict[str, str] = model.all_tied_weights_keys
    targets = _match(model, checkpoint, wanted)
    planned = [(target, *_plan_reads(target, checkpoint, cuts)) for target in targets if target.name not in tied]
    total = sum(checkpoint.bytes_of(read.key, read.cut) for _, reads, _ in planned for read in reads)
    done = held = 0
    loaded: set[str] = set()
    for target, reads, cut_after in planned:
        for name, tensor in _realise(target, reads, checkpoint, model):
            cut = cuts.get(name)
            if cut is not None and cut_after:
                before = (slice(None),) * cut.dim
                tensor = torch.cat([tensor[(*before, slice(a, b))] for a, b in cut.ranges], dim=cut.dim)
            held += _place(model, name, tensor, wanted[name], cut, device)
            loaded.add(name)
        done += sum(checkpoint.bytes_of(read.key, read.cut) for read in reads)
        if progress is not None:
            progress(done, total)
    missing = sorted(set(wanted) - loaded - set(tied))
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise InvalidModel(f"{checkpoint.name}: the checkpoint lacks {shown}; fetch it again, or fix its index")
    for name, source in tied.items():
        _owner(model, name)._parameters[name.rpartition(".")[2]] = model.get_parameter(source)
    return held


def _match(model: PreTrainedModel, checkpoint: Checkpoint, wanted: dict[str, Tensor]) -> list[_Target]:
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets: dict[str, _Target] = {}
    unused = []
    for key in sorted(checkpoint.entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            unused.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        target = targets.setdefault(name, _Target(name, converter))
        target.sources.setdefault(pattern or key, []).append(key)
    if unused:  # heads of other tasks or buffers of older versions; or a config.json that promises too little
        _log.warning("%s: %d tensors are not used, the first is %s", checkpoint.name, len(unused), unused[0])
    return list(targets.values())


def _plan_reads(target: _Target, checkpoint: Checkpoint, cuts: dict[str, TensorSlice]) -> tuple[list[_Read], bool]:
    """The reads, and whether the converted result is still whole and to be cut."""
    cut = cuts.get(target.name)
    pairs = [(pattern, key) for pattern, keys in target.sources.items() for key in keys]
    if target.converter is None:
        return [_Read(key, pattern, cut) for pattern, key in pairs], False
    operations = target.converter.operations
    if cut is None or not all(isinstance(op, (MergeModulelist, Concatenate)) for op in operations):
        return [_Read(key, pattern, None) for pattern, key in pairs], cut is not None
    merges = [op.dim for op in operations if isinstance(op, MergeModulelist)]
    joins = [op.dim for op in operations if isinstance(op, Concatenate)]
    if any(dim >= cut.dim for dim in merges):  # cut by expert, not inside experts
        return [_Read(key, pattern, None) for pattern, key in pairs], True
    source_dim = cut.dim - len(merges)
    reads, start = [], 0
    for pattern in target.converter.source_patterns:
        keys = target.sources.get(pattern, [])
        local = cut
        if keys and cut.dim in joins:  # each source fills its own stretch of the joined dimension
            stop = start + checkpoint.entries[keys[0]].shape[source_dim]
            local, start = cut.window(start, stop), stop
        reads += [_Read(key, pattern, local.along(source_dim)) for key in keys]
    return reads, False


def _realise(
    target: _Target, reads: list[_Read], checkpoint: Checkpoint, model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    if target.converter is None:
        yield target.name, checkpoint.read(reads[0].key, reads[0].cut)
        return
    converter = deepcopy(target.converter)  # it collects tensors inside itself
    for read in reads:
        tensor = checkpoint.read(read.key, read.cut)
        converter.collected_tensors[read.pattern].append(tensor)  # type: ignore[arg-type]  # tensors serve too
    for name, tensor in converter.convert(target.name, model=model, config=model.config).items():
        yield name, tensor[0] if isinstance(tensor, list) else tensor


def _place(
    model: PreTrainedModel, name: str, tensor: Tensor, empty: Tensor, cut: TensorSlice | None, device: torch.device
) -> int:
    expected = tuple(empty.shape) if cut is None else cut.shape_of(tuple(empty.shape))
    if tuple(tensor.shape) != expected:
        raise InvalidModel(
            f"tensor {name} has shape {list(tensor.shape)}, the config promises {list(expected)}: "
            "the checkpoint and its config.json do not belong together"
        )
    # A slice of a mapped file must become memory of our own, or the page cache decides how fast we are.
    tensor = tensor.to(device=device, dtype=empty.dtype).clone(memory_format=torch.contiguous_format)
    owner, leaf = _owner(model, name), name.rpartition(".")[2]
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
    if isinstance(owner, nn.Linear) and leaf == "weight":
        owner.out_features, owner.in_features = tensor.shape
    return tensor.nbytes


def _owner(model: PreTrainedModel, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
