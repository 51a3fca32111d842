"""write_weights(): a checkpoint's weights as llama.cpp's converter writes them.

The names of tensors are those of the `gguf` package. What the converter does to values is written here once more, in
the direction of GGUF, and shares nothing with the code under test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.workers.gguf.gguf_metadata import layer_count

# Parts of names behind which there is an index. GGUF has one tensor for all indices.
_STACKED = ("experts", "altup_projections", "altup_unembed_projections")


class StoreTensor(Protocol):
    def __call__(self, name: str, values: np.ndarray, seed: int, *, is_plain: bool = False) -> np.ndarray:
        """Write a tensor in the type for its name, or in float32. Returns the values that it stands for."""


@dataclass(frozen=True)
class _Change:
    """What the converter does to a weight: a function of the values, and what takes a tensor of GGUF back."""

    forth: Callable[[np.ndarray], np.ndarray]
    back: Callable[[np.ndarray], np.ndarray]


def write_weights(
    store: StoreTensor, arch: str, config: Mapping[str, Any], weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the weights that the written tensors stand for."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = layer_count(config)
    names = gguf.get_tensor_name_map(number, layers)
    held: dict[str, Tensor] = {}
    experts: dict[str, dict[int, str]] = {}
    for seed, (name, tensor) in enumerate(sorted(weights.items())):
        values, parts = tensor.float().numpy(), name.split(".")
        if arch == "gpt-oss" and "experts" in parts:
            held[name] = _store_gpt_oss(store, name, values, seed)
            continue
        stacked_by = next((part for part in _STACKED if part in parts), None)
        if stacked_by is not None and arch != "gemma4":  # stacked below
            place = parts.index(stacked_by) + 1
            index = int(parts.pop(place))
            experts.setdefault(".".join(parts), {})[index] = name
            continue
        if name.endswith("kv_b_proj.weight") and config["model_type"] != "deepseek_v2":
            held[name] = _store_latent_heads(store, config, name, values, seed)
            continue
        if (divided := _divide(config, name, values)) is not None:
            found_parts = [
                store(f"blk.{parts[2]}.{leaf}.weight", np.ascontiguousarray(part), 1000 * place + seed)
                for place, (leaf, part) in enumerate(divided.items())
            ]
            held[name] = torch.from_numpy(_unite(config, name, found_parts).reshape(values.shape))
            continue
        known = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".dt_bias", ".dt_proj.bias")
        known = known.replace("expert_bias", "expert_bias.bias")
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if arch == "gemma4" and name.endswith((".router.scale", ".per_expert_scale")):
            found = f"blk.{parts[2]}.{'ffn_gate_inp' if parts[-1] == 'scale' else 'ffn_down_exps'}.scale"
        assert found is not None, name
        if arch == "granitehybrid" and not config["num_local_experts"]:
            found = found.replace("ffn_down_shexp", "ffn_down")
        found += (
            ".weight" if found.endswith(("attn_sinks", "layer_output_scale", "altup_correct_scale", "_exps")) else ""
        )
        change = _change_of(arch, config, name, values)
        changed = values if change is None else change.forth(values)
        plain = (".conv.", "conv1d", "ffn_gate_inp", "_norm.", ".altup_", ".ssm_dt.")
        is_plain = changed.ndim == 1 or any(part in (name if "conv" in part else found) for part in plain)
        is_plain = is_plain or found.endswith((".ssm_a", ".ssm_d"))
        back = store(found, np.ascontiguousarray(changed), seed, is_plain=is_plain)
        held[name] = torch.from_numpy((back if change is None else change.back(back)).copy()).reshape(tensor.shape)
    for seed, (merged, by_index) in enumerate(experts.items()):
        merged = merged.removeprefix("model.") if arch == "lfm2moe" else merged
        if arch == "nemotron_h_moe":
            merged = merged.replace("backbone", "model").replace(".mixer.", ".mlp.")
        found = names.get_name(merged, try_suffixes=(".weight",))
        assert found is not None, merged
        stacked = np.stack([weights[by_index[index]].float().numpy() for index in range(len(by_index))])
        back = store(found, stacked, 1000 + seed)
        held |= {by_index[index]: torch.from_numpy(back[index].copy()) for index in range(len(by_index))}
    if arch == "glm4moe":  # a layer that predicts further tokens
        for leaf in ("attn_norm", "nextn.eh_proj", "nextn.enorm"):
            store(f"blk.{layers}.{leaf}.weight", np.ones((64, 64), np.float32), 0, is_plain=True)
    for layer in range(layers - config.get("num_kv_shared_layers", 0), layers):  # Gemma's checkpoints have them too
        store(f"blk.{layer}.attn_k.weight", np.ones((64, 256), np.float32), 0)
        store(f"blk.{layer}.attn_k_norm.weight", np.ones(32, np.float32), 0, is_plain=True)
    return held


def _change_of(arch: str, config: Mapping[str, Any], name: str, values: np.ndarray) -> _Change | None:
    order = _row_order(arch, config, name, len(values))
    if order is not None:
        back = np.argsort(order)
        if name.endswith("A_log"):
            return _Change(lambda one: -np.exp(one[order]), lambda one: np.log(-one)[back])
        if name.endswith("conv1d.weight"):
            return _Change(lambda one: one[order, 0], lambda one: one[back])
        return _Change(lambda one: one[order], lambda one: one[back])
    if arch in ("qwen35", "qwen35moe") and name.endswith("linear_attn.out_proj.weight"):
        columns = _by_value_head(config, values.shape[1])
        return _Change(lambda one: one[:, columns], lambda one: one[:, np.argsort(columns)])
    if name.endswith("A_log"):
        is_column = values.ndim == 1 and arch != "qwen3next"
        return _Change(lambda one: -np.exp(one[:, None] if is_column else one), lambda one: np.log(-one))
    if name.endswith((".mamba.D", ".mixer.D")) and arch != "mamba":
        return _Change(lambda one: one[:, None], lambda one: one)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return _Change(lambda one: one.reshape(2, -1), lambda one: one)
    if name.endswith("conv1d.weight"):
        return _Change(lambda one: one[:, 0], lambda one: one)
    has_one = arch in ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
    if has_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return _Change(lambda one: one + 1, lambda one: one - 1)
    if name.endswith("conv.conv.weight"):
        return _Change(lambda one: one[:, 0], lambda one: one)
    if arch == "gpt2" and values.ndim == 2 and ".h." in name:
        return _Change(np.transpose, np.transpose)
    if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
        return _Change(lambda one: one[0], lambda one: one)
    return None


def _row_order(arch: str, config: Mapping[str, Any], name: str, rows: int) -> np.ndarray | None:
    """Which row of the checkpoint each row in GGUF is."""
    by_row = np.arange(rows)
    is_query_or_key = "q_proj" in name or "k_proj" in name
    permuted = (
        "llama", "mistral3", "arcee", "granite", "smollm3", "olmo", "granitemoe", "granitehybrid", "nemotron_h",
        "nemotron_h_moe",
    )  # fmt: skip
    if arch in permuted and is_query_or_key:
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return by_row.reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    if arch == "glm4" and "mrope_section" in config["rope_parameters"] and is_query_or_key:
        by_head = by_row.reshape(-1, config["head_dim"])
        half = config["head_dim"] // 2
        return np.concatenate([by_head[:, :half:2], by_head[:, 1:half:2], by_head[:, half:]], axis=1).ravel()
    if arch == "gptneox" and "query_key_value" in name:
        return by_row.reshape(config["num_attention_heads"], 3, -1).swapaxes(0, 1).ravel()
    if arch == "falcon" and "query_key_value" in name:
        groups = config["num_kv_heads"]
        by_group = by_row.reshape(groups, config["num_attention_heads"] // groups + 2, -1)
        return np.concatenate([by_group[:, :-2].ravel(), by_group[:, -2].ravel(), by_group[:, -1].ravel()])
    if arch in ("qwen35", "qwen35moe") and "linear_attn." in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
            return np.concatenate([by_row[:keys], keys + _by_value_head(config, rows - keys)])
        if any(part in name for part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")):
            return _by_value_head(config, rows)
    return None


def _divide(config: Mapping[str, Any], name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
    """{name in a layer: values} of a weight that GGUF has as several tensors; None for another weight."""
    if name.endswith("input_linear.weight"):
        is_shared = "shared_mlp" in name
        suffix = "_exps" if not is_shared else "_shexp" if config["num_local_experts"] else ""
        gate, up = np.split(values, 2, axis=-2)
        return {f"ffn_gate{suffix}": gate, f"ffn_up{suffix}": up}
    if name.endswith("in_proj_qkvz.weight"):
        parts = [part.reshape(-1, values.shape[1]) for part in np.split(_by_key_head(config, values), _ends(config), 1)]
        return {"attn_qkv": np.concatenate(parts[:3]), "attn_gate": parts[3]}
    return None


def _unite(config: Mapping[str, Any], name: str, parts: list[np.ndarray]) -> np.ndarray:
    """The opposite of _divide."""
    if name.endswith("input_linear.weight"):
        return np.concatenate(parts, axis=-2)
    heads, keys = config["linear_num_key_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    q, k, v = np.split(parts[0], [keys, 2 * keys])
    return np.concatenate([part.reshape(heads, -1, part.shape[1]) for part in (q, k, v, parts[1])], axis=1)


def _by_key_head(config: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    return values.reshape(config["linear_num_key_heads"], -1, values.shape[1])


def _ends(config: Mapping[str, Any]) -> list[int]:
    """Where queries, keys and values of a key head end in in_proj_qkvz."""
    key, group = config["linear_key_head_dim"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return [key, 2 * key, 2 * key + group * config["linear_value_head_dim"]]


def _by_value_head(config: Mapping[str, Any], count: int) -> np.ndarray:
    """The first value head of each key head, then the second of each, and so on."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(count).reshape(keys, heads // keys, -1).transpose(1, 0, 2).ravel()


def _store_latent_heads(
    store: StoreTensor, config: Mapping[str, Any], name: str, values: np.ndarray, seed: int
) -> Tensor:
    """kv_b_proj as two tensors, the keys' part transposed."""
    layer, heads, width = name.split(".")[2], config["num_attention_heads"], config["qk_nope_head_dim"]
    by_head = values.reshape(heads, -1, values.shape[1])
    keys = store(f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(by_head[:, :width].transpose(0, 2, 1)), seed)
    back = store(f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(by_head[:, width:]), seed)
    return torch.from_numpy(np.concatenate([keys.transpose(0, 2, 1), back], axis=1).reshape(values.shape))


def _store_gpt_oss(store: StoreTensor, name: str, values: np.ndarray, seed: int) -> Tensor:
    """Experts of gpt-oss: [experts, in, out] in transformers, with gate and up alternating; [experts, out, in] in
    GGUF."""
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    values = values if is_bias else values.swapaxes(1, 2)
    ending = "bias" if is_bias else "weight"
    leaves = ["down"] if "down_proj" in name else ["gate", "up"]
    parts = [values] if len(leaves) == 1 else [values[:, 0::2], values[:, 1::2]]
    found = []
    for place, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        gguf_name = f"blk.{layer}.ffn_{leaf}_exps.{ending}"
        found.append(store(gguf_name, np.ascontiguousarray(part), 1000 * (place + 1) + seed, is_plain=is_bias))
    back = found[0] if len(found) == 1 else np.stack(found, axis=2).reshape(values.shape)
    return torch.from_numpy(back if is_bias else back.swapaxes(1, 2).copy())
