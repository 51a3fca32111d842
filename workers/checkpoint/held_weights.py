"""held_bytes(): the bytes that the weights of a checkpoint take on a rank, from the headers of its files.

It counts as weight_loader.py does in a group of one rank. It reads only headers, GPTQ's column orders, and a head and
an embedding that may be equal. This module imports no torch.
"""

import array
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

from coatcheck.workers.checkpoint.model_alias import is_indexer_weight
from coatcheck.workers.checkpoint.quantised_layouts import plain_entries, read_bytes, read_quantised
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry, are_stored_alike
from coatcheck.workers.checkpoint.stored_weight import Encoding, StoredWeight
from coatcheck.workers.checkpoint.text_tower import text_tensor_name

# Bytes that a rank holds of one scale, by its stored dtype. U8: E8M0.
_HELD_SCALES: Final = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
# By device: a weight stays quantised only if its group size is a multiple of this (kernels/layers/linear.py).
_WORDS: Final = {"cpu": 8, "cuda": 16}
_GROUP: Final = 128  # columns that share a scale with quantization int4
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "transformer.wte.weight")
# Modules that --quantization leaves as they are: heads, routers, and of gated delta nets and Mamba mixers the decay of
# a state and the strength of its updates, on which every later token depends. Kimi's g_a_proj is merged with f_a_proj
# and b_proj, which are two of these.
UNQUANTISED: Final = frozenset(
    (
        "lm_head", "embed_out", "gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba",
        "x_proj", "dt_proj", "a_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj",
    )
)  # fmt: skip
_MTP: Final = re.compile(r"(.+\.)?mtp[._]")  # layers for multi-token prediction, which are not loaded
_LAYER: Final = re.compile(r".*\blayers\.(\d+)\..+")
# By model type: how many of the last layers read the keys and values of earlier layers, if config.json lacks
# num_kv_shared_layers.
SHARED_LAYERS: Final = {"gemma3n_text": 15}
# Published checkpoints have these tensors in such layers, too. No code reads them there.
_KEYS_AND_VALUES: Final = re.compile(r".+\.self_attn\.[kv]_(proj|norm)\..+")
# Tensors that stay float32 in every dtype (_keep_in_float32 of meta_model.py), and hunyuan_v1_moe's router (wg).
_FLOAT32: Final = re.compile(
    r".+\.(e_score_correction_bias|feed_forward\.expert_bias|A_log|gate\.wg\.weight|moe_statics\..+)"
)
_ROUTER: Final = ".mlp.gate.weight"  # in ernie4_5_moe it stays float32, too
# A weight of one expert: (the experts of its layer, the weight's name). Gate and up are held as one weight.
_EXPERT: Final = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_DOWN: Final = ("down_proj", "w2")
# A tensor with the weights of all experts.
_FUSED: Final = re.compile(r".+\.(experts\.(gate_up|down)_proj|(in|out)put_linear\.weight)")
# Model types whose experts have unquantised weights, which transformers' code or an adapter reads.
_PLAIN_EXPERTS: Final = frozenset(("aria_text", "jetmoe", "llama4_text", "nemotron_h"))
# The linears of latent attention (MLA) that are dequantised, because LatentAttention splits and reorders them.
_LATENT: Final = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def held_bytes(
    name: str,
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    itemsize: int,
    device: str,
    quantization: str = "auto",
    *,
    is_multimodal: bool = False,
    ties_head: bool = False,
) -> int:
    """`name`: of the model, for errors. `entries`: of the checkpoint's files. `itemsize`: bytes of an element of the
    model's dtype; on CPUs the dtype must be bfloat16 or float32. `device`: cpu or cuda. `quantization`: as in
    ServeConfig. `is_multimodal`: only the text model's tensors are loaded. `ties_head`: config.json ties the head to
    the embedding. Raises InvalidModel as read_quantised does."""
    quantised = read_quantised(name, config, entries)
    plain = _LATENT if config.get("kv_lora_rank") is not None else ()
    are_experts_plain = config.get("model_type") in _PLAIN_EXPERTS
    total = 0
    stacks: dict[tuple[str, bool], list[tuple[int, _Codes | None]]] = {}  # (plain bytes, codes) of each expert's weight
    layers = config.get("num_hidden_layers")
    num_shared = config.get("num_kv_shared_layers", SHARED_LAYERS.get(config.get("model_type", ""), 0)) or 0
    stored = plain_entries(entries, quantised)
    head = _head_equal_to_embedding(stored, quantised.weights, is_multimodal) if ties_head else None
    for stored_key, entry in stored.items():
        key = text_tensor_name(stored_key) if is_multimodal else stored_key
        if key is None or stored_key == head:
            continue
        layer = _LAYER.fullmatch(key)
        if layer is not None and isinstance(layers, int):
            if int(layer[1]) >= layers:
                continue  # a layer for multi-token prediction, which is not loaded
            if int(layer[1]) >= layers - num_shared and _KEYS_AND_VALUES.fullmatch(key):
                continue
        if _MTP.match(key) or _is_identity_expert(config, key) or is_indexer_weight(config, key):
            continue
        if config.get("model_type") == "axk1" and key.endswith(_ROUTER):
            bias = stored_key.removesuffix("weight") + "e_score_correction_bias"
            total += 0 if bias in stored else 4 * entry.shape[0]  # a rank holds zeros for an absent one
        is_float32 = _FLOAT32.fullmatch(key) or (config.get("model_type") == "ernie4_5_moe" and key.endswith(_ROUTER))
        as_plain = prod(entry.shape) * (4 if is_float32 else itemsize)
        weight = quantised.weights.get(stored_key)
        codes = None if weight is None else _codes_of(weight, entries, device)
        expert = _EXPERT.fullmatch(key)
        is_of_experts = ".experts." in key or len(entry.shape) == 3
        if key.rpartition(".")[0].rpartition(".")[2] in plain or (are_experts_plain and is_of_experts):
            total += as_plain
        elif expert is not None and weight is not None:
            stacks.setdefault((expert[1], expert[2] in _DOWN), []).append((as_plain, codes))
        elif codes is not None:
            total += codes.bytes + (codes.bytes_widened if device == "cuda" else 0)
        elif quantization != "auto" and _is_quantised_at_load(key, entry):
            total += _bytes_at_load(_matrix_of(config, entry.shape), quantization)
        else:
            total += as_plain
    return total + sum(_bytes_of_stack(weights) for weights in stacks.values())


def _head_equal_to_embedding(
    stored: Mapping[str, TensorEntry], quantised: Container[str], is_multimodal: bool
) -> str | None:
    """The key of the stored head, if it equals the embedding, so that a rank holds the embedding alone. Else None."""
    keys = {text_tensor_name(key) if is_multimodal else key: key for key in stored if key not in quantised}
    head, table = keys.get("lm_head.weight"), next((keys[name] for name in _EMBEDDINGS if name in keys), None)
    if head is None or table is None:
        return None
    return head if are_stored_alike(stored[head], stored[table]) else None


def _is_identity_expert(config: Mapping[str, Any], key: str) -> bool:
    """Whether `key` is a weight of one of longcat_flash's last experts. They are identities, and no code reads their
    weights."""
    experts = config.get("n_routed_experts")
    if not config.get("zero_expert_num") or not isinstance(experts, int):
        return False
    index = re.search(r"\.experts\.(\d+)\.", key)
    return index is not None and int(index[1]) >= experts


@dataclass(frozen=True, slots=True)
class _Codes:
    """A weight that stays quantised. `layout`: equal for weights that are stored in the same way. `is_scattered`: see
    _is_scattered. `bytes_widened`: added for a linear on a GPU, where its scales become float32 (widen_scales of
    kernels/layers/linear.py)."""

    bytes: int
    layout: tuple[Any, ...]
    is_scattered: bool
    bytes_widened: int = 0


def _bytes_of_stack(weights: Sequence[tuple[int, _Codes | None]]) -> int:
    """The bytes of the same weight of all experts of a layer. They stay quantised only if all are stored in the same
    way, and no columns are scattered. `weights`: (bytes if dequantised, codes) of each expert."""
    codes = [held for _, held in weights if held is not None and not held.is_scattered]
    if len(codes) == len(weights) and len({held.layout for held in codes}) == 1:
        return sum(held.bytes for held in codes)
    return sum(as_plain for as_plain, _ in weights)


def _codes_of(weight: StoredWeight, entries: Mapping[str, TensorEntry], device: str) -> _Codes | None:
    """The bytes of codes, scales, zero points and column order; None for a weight that is dequantised."""
    if weight.encoding is Encoding.NF4:
        return None
    scales = entries[weight.parts["scales"].key]
    if weight.encoding is Encoding.MXFP4:
        return _Codes(prod(weight.shape) // 2 + prod(scales.shape), (Encoding.MXFP4,), is_scattered=False)
    rows, columns = weight.shape
    by_column = weight.encoding in (Encoding.AWQ, Encoding.GPTQ)
    groups = scales.shape[0] if by_column else scales.shape[-1] if len(scales.shape) == 2 else 1
    is_ordered = "order" in weight.parts and groups > 1
    group = columns if groups == 1 else columns // groups if is_ordered else weight.block[1]
    if groups > 1 and group % _WORDS[device]:
        return None
    held = rows * (columns if weight.bits == 8 else -(-columns // 2)) + rows * groups * _HELD_SCALES[scales.dtype]
    if scales.dtype == "F8_E4M3":  # on CPUs with a float32 factor for each row; on GPUs the scales become float32
        held += rows * 4 if device == "cpu" else rows * groups * 3
    zeros = weight.parts.get("zeros")
    are_fractions = zeros is not None and entries[zeros.key].dtype == "F32"
    if zeros is not None:
        held += rows * groups * (4 if are_fractions else 1)
    is_scattered = is_ordered and _is_scattered(entries[weight.parts["order"].key])
    if is_scattered:
        held += 4 * columns
    layout = (weight.encoding, weight.bits, columns, group, scales.dtype, zeros is None, are_fractions)
    widened = rows * (4 - _HELD_SCALES[scales.dtype]) if weight.bits == 8 and groups == 1 else 0
    return _Codes(held, layout, is_scattered, widened)


def _is_scattered(order: TensorEntry) -> bool:
    """Whether the columns of a group are not contiguous. `order`: the group of each column."""
    members = array.array("i" if order.dtype == "I32" else "q", read_bytes(order))
    return any(one > other for one, other in pairwise(members))


def _is_quantised_at_load(key: str, entry: TensorEntry) -> bool:
    """Whether --quantization quantises the tensor, by its name: experts, and linears inside layers except those of
    UNQUANTISED."""
    if len(entry.shape) == 3:
        return _FUSED.fullmatch(key) is not None
    module, _, leaf = key.rpartition(".")
    is_linear = leaf == "weight" and len(entry.shape) == 2 and (".layers." in key or ".h." in key)
    return is_linear and not UNQUANTISED.intersection(module.split("."))


def _matrix_of(config: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a linear, or of all experts of one tensor together. gpt-oss' experts are stored transposed."""
    if len(shape) == 2:
        return shape[0], shape[1]
    experts, rows, columns = shape if config.get("model_type") != "gpt_oss" else (shape[0], shape[2], shape[1])
    return experts * rows, columns


def _bytes_at_load(shape: tuple[int, int], quantization: str) -> int:
    """The bytes of codes and scales that `quantise` of kernels/layers/quantised_weight.py makes."""
    rows, columns = shape
    if quantization == "int4":
        return rows * -(-columns // 2) + rows * -(-columns // _GROUP) * 2
    return rows * columns + rows * 4
