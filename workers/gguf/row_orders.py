"""Orders of rows and columns that GGUF changes: for each model family, how to find the transformers order.

A RowOrder takes a file and the number of rows. For each of transformers' rows it returns the index of that row in GGUF.
Orders of columns are functions of the same kind. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.block_codes import Array
from coatcheck.workers.gguf.field_readers import head_width, kv_heads
from coatcheck.workers.gguf.gguf_file import GgufFile

RowOrder = Callable[[GgufFile, int], Array]


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of a layer that are one weight of transformers, by their names in the layer. `order`: as of one tensor
    that has their rows one after the other."""

    leaves: tuple[str, ...]
    order: RowOrder


def _rotary_pairs(heads_key: str) -> RowOrder:
    """The order of llama. In GGUF the two rows of a rotary pair are neighbours. In transformers a head has the first
    rows of all pairs, then the second rows. `heads_key`: the metadata key of the number of heads."""

    def order(file: GgufFile, rows: int) -> Array:
        heads = kv_heads(file) if heads_key == "attention.head_count_kv" else file.count(heads_key)
        _check_division(file, rows, 2 * heads)
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    return order


def _glm_pairs(file: GgufFile, rows: int) -> Array:
    """The opposite of `_rotary_pairs`, for the rotated part of each head, in files whose positions have sections for
    images; other files have transformers' order."""
    in_order = np.arange(rows)
    if file.find("rope.dimension_sections") is None:
        return in_order
    width = head_width(file)
    rotated = file.count("rope.dimension_count", width)
    _check_division(file, rows, width)
    by_head = in_order.reshape(-1, width)
    pairs = by_head[:, :rotated].reshape(len(by_head), 2, -1).swapaxes(1, 2).reshape(len(by_head), -1)
    return np.concatenate([pairs, by_head[:, rotated:]], axis=1).ravel()


def _falcon_groups(file: GgufFile, rows: int) -> Array:
    """GGUF has the queries of all heads, then the keys, then the values. transformers has them by key/value head."""
    heads = file.count("attention.head_count")
    kv_heads = file.count("attention.head_count_kv", 1)
    _check_division(file, rows, heads + 2 * kv_heads)
    _check_division(file, heads, kv_heads)
    by_head = np.arange(rows).reshape(heads + 2 * kv_heads, -1)
    queries = by_head[:heads].reshape(kv_heads, heads // kv_heads, -1)
    keys, values = (by_head[start : start + kv_heads, np.newaxis] for start in (heads, heads + kv_heads))
    return np.concatenate([queries, keys, values], axis=1).ravel()


def _value_heads(file: GgufFile, rows: int) -> Array:
    """The value heads of a gated delta net. GGUF has the first value head of every key head, then the second of every
    key head. transformers has all value heads of the first key head, then all of the second."""
    key_heads, heads = file.count("ssm.group_count"), file.count("ssm.time_step_rank")
    _check_division(file, rows, heads)
    _check_division(file, heads, key_heads)
    return np.arange(rows).reshape(heads // key_heads, key_heads, -1).swapaxes(0, 1).ravel()


def _values_behind_keys(file: GgufFile, rows: int) -> Array:
    """As `_value_heads`, behind the rows of queries and keys, which keep their order."""
    first = 2 * file.count("ssm.group_count") * file.count("ssm.state_size")
    return np.concatenate([np.arange(first), first + _value_heads(file, rows - first)])


def alternate_rows(file: GgufFile, rows: int) -> Array:
    """The rows of two tensors in turn."""
    return np.arange(rows).reshape(2, -1).T.ravel()


def _one_after_the_other(file: GgufFile, rows: int) -> Array:
    return np.arange(rows)


def _gate_and_up_by_expert(file: GgufFile, rows: int) -> Array:
    """transformers has the gate of an expert before the up projection of this expert."""
    experts = file.count("expert_count")
    _check_division(file, rows, 2 * experts)
    return np.arange(rows).reshape(2, experts, -1).swapaxes(0, 1).ravel()


def _qkvz_by_key_head(file: GgufFile, rows: int) -> Array:
    """GGUF has the queries of all key heads, then the keys, the values, and the gates z. transformers has all four of
    the first key head, then those of the second."""
    heads = file.count("ssm.group_count")
    keys = heads * file.count("ssm.state_size")
    values = (rows - 2 * keys) // 2
    _check_division(file, rows, 2 * heads)
    _check_division(file, values, heads)
    parts = np.split(np.arange(rows), np.cumsum([keys, keys, values]))
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).ravel()


def _qkv_by_head(file: GgufFile, rows: int) -> Array:
    """GGUF has the queries of all heads, then the keys, then the values. transformers has all three of the first head,
    then those of the second."""
    heads = file.count("attention.head_count")
    _check_division(file, rows, 3 * heads)
    return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).ravel()


def _check_division(file: GgufFile, count: int, parts: int) -> None:
    if parts < 1 or count < 1 or count % parts:
        raise InvalidModel(f"{file.path}: heads of attention do not divide {count} by {parts}; fetch it again")


LLAMA_ORDERS: Final = {
    "attn_q": _rotary_pairs("attention.head_count"),
    "attn_k": _rotary_pairs("attention.head_count_kv"),
}
GLM4_ORDERS: Final = {"attn_q": _glm_pairs, "attn_k": _glm_pairs}
GPT_NEOX_ORDERS: Final = {"attn_qkv": _qkv_by_head}
FALCON_ORDERS: Final = {"attn_qkv": _falcon_groups}
DELTA_NET_ORDERS: Final = {
    "attn_qkv": _values_behind_keys,
    "ssm_conv1d": _values_behind_keys,
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"), _value_heads),
}
DELTA_NET_COLUMNS: Final = {"ssm_out": _value_heads}
GATE_AND_UP: Final = Joined(("ffn_gate", "ffn_up"), _one_after_the_other)
SHARED_GATE_AND_UP: Final = Joined(("ffn_gate_shexp", "ffn_up_shexp"), _one_after_the_other)
EXPERTS_GATE_AND_UP: Final = Joined(("ffn_gate_exps", "ffn_up_exps"), _gate_and_up_by_expert)
QKV_AND_Z: Final = Joined(("attn_qkv", "attn_gate"), _qkvz_by_key_head)
