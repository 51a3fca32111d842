"""held_bytes(): the bytes that the weights of a checkpoint take on a CPU rank, from the headers of its files.

The same count as weight_loader.py's, for a group of one rank. This module imports no torch.
"""

import array
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, Final

from coatcheck.workers.checkpoint.quantised_layouts import plain_entries, read_bytes, read_quantised
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry
from coatcheck.workers.checkpoint.stored_weight import Encoding, StoredWeight

_SIZES: Final = {"F32": 4, "BF16": 2, "F16": 2}
_DECODED: Final = (Encoding.MXFP4, Encoding.NF4)
_WORD: Final = 8  # columns of which a group that stays quantised is a multiple
_GROUP: Final = 128  # that share a scale, with quantization int4
_UNQUANTISED: Final = frozenset(("lm_head", "embed_out", "gate", "router", "shared_expert_gate"))
_EXPERTS: Final = ".experts."  # of a mixture: held plain
# Of latent attention (MLA), which splits and reorders these weights.
_LATENT: Final = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def held_bytes(
    name: str, config: Mapping[str, Any], entries: Mapping[str, TensorEntry], itemsize: int, quantization: str = "auto"
) -> int:
    """`entries`: of the files. `itemsize`: of the model's dtype, bfloat16 or float32. `quantization`: as in
    ServeConfig. Raises InvalidModel as read_quantised does."""
    quantised = read_quantised(name, config, entries)
    plain = _LATENT if config.get("kv_lora_rank") is not None else ()
    total = 0
    for key, entry in plain_entries(entries, quantised).items():
        held = None
        if key.rpartition(".")[0].rpartition(".")[2] in plain or _EXPERTS in key:
            pass
        elif (weight := quantised.weights.get(key)) is not None:
            held = _bytes_of_codes(weight, entries)
        elif quantization != "auto" and _is_quantised_at_load(key, entry):
            held = _bytes_at_load(entry.shape, quantization)
        total += prod(entry.shape) * itemsize if held is None else held
    return total


def _bytes_of_codes(weight: StoredWeight, entries: Mapping[str, TensorEntry]) -> int | None:
    """Codes, scales, zero points and order; None for a weight that is decoded."""
    if weight.encoding in _DECODED:
        return None
    rows, columns = weight.shape
    scales = entries[weight.parts["scales"].key]
    by_column = weight.encoding in (Encoding.AWQ, Encoding.GPTQ)
    groups = scales.shape[0] if by_column else scales.shape[-1] if len(scales.shape) == 2 else 1
    is_ordered = "order" in weight.parts and groups > 1
    group = columns if groups == 1 else columns // groups if is_ordered else weight.block[1]
    if groups > 1 and group % _WORD:
        return None
    held = rows * (columns if weight.bits == 8 else -(-columns // 2)) + rows * groups * _SIZES[scales.dtype]
    if "zeros" in weight.parts:
        held += rows * groups
    if is_ordered and _is_scattered(entries[weight.parts["order"].key]):
        held += 4 * columns
    return held


def _is_scattered(order: TensorEntry) -> bool:
    """Whether columns of a group are not neighbours."""
    members = array.array("i" if order.dtype == "I32" else "q", read_bytes(order))
    return any(one > other for one, other in pairwise(members))


def _is_quantised_at_load(key: str, entry: TensorEntry) -> bool:
    """By its name: a linear inside a layer, and no router."""
    module, _, leaf = key.rpartition(".")
    is_linear = leaf == "weight" and len(entry.shape) == 2 and (".layers." in key or ".h." in key)
    return is_linear and not _UNQUANTISED.intersection(module.split("."))


def _bytes_at_load(shape: tuple[int, ...], quantization: str) -> int:
    """As kernels/layers/round_to_nearest.py stores them."""
    rows, columns = shape
    if quantization == "int4":
        return rows * -(-columns // 2) + rows * -(-columns // _GROUP) * 2
    return rows * columns + rows * 4
