"""Tiny models as GGUF files, written with llama.cpp's own writer, and the weights that they stand for.

The names of tensors are those of the `gguf` package. What llama.cpp's converter does to values is written here once
more, in the direction of GGUF, and shares nothing with the code under test. Blocks of types that the package cannot
quantise to are random.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import CONFIG_MAPPING

from coatcheck.workers.verification.random_model import write_random_checkpoint

_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
_LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32,
    short_factor=[1 + 0.05 * place for place in range(16)], long_factor=[1 + 0.5 * place for place in range(16)],
)  # fmt: skip
_SHARE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
_PLAIN_NORMS: dict[str, Any] = dict(use_qkv_bias=True, rope_parameters=_SHARE)
_GPT2: dict[str, Any] = dict(n_embd=256, n_head=8, n_layer=2, n_inner=512, n_positions=256)
# name -> (llama.cpp's architecture, transformers' model type, fields of its config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-biases": ("llama", "llama", dict(attention_bias=True, mlp_bias=True)),
    "llama3": (
        "llama", "llama", dict(rope_parameters=_LLAMA3, max_position_embeddings=16384, tie_word_embeddings=True),
    ),
    "llama-other-divisors": (
        "llama", "llama", dict(rope_parameters=_LLAMA3 | dict(high_freq_factor=3.0), max_position_embeddings=16384),
    ),
    "mixtral": ("llama", "mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "granite": (
        "granite",
        "granite",
        dict(embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.3, attention_multiplier=0.2),
    ),
    "smollm3": ("smollm3", "smollm3", dict(num_hidden_layers=5)),
    "qwen2": ("qwen2", "qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", "qwen3", dict(head_dim=64)),
    "qwen2-moe": ("qwen2moe", "qwen2_moe", _EXPERTS | dict(shared_expert_intermediate_size=256)),
    "qwen3-moe": ("qwen3moe", "qwen3_moe", _EXPERTS | dict(head_dim=64, norm_topk_prob=True)),
    "olmo2": ("olmo2", "olmo2", {}),
    "phi3": ("phi3", "phi3", dict(rope_parameters=_SHARE, original_max_position_embeddings=256)),
    "phi3-longrope": ("phi3", "phi3", dict(rope_parameters=_LONGROPE, original_max_position_embeddings=32)),
    "gemma": ("gemma", "gemma", dict(head_dim=64, tie_word_embeddings=True)),
    "gemma2": ("gemma2", "gemma2", dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32)),
    "gemma3": (
        "gemma3", "gemma3_text", dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32, num_hidden_layers=7),
    ),
    "starcoder2": ("starcoder2", "starcoder2", dict(use_bias=True, sliding_window=4096)),
    "stablelm": ("stablelm", "stablelm", _PLAIN_NORMS),
    "stablelm-parallel": ("stablelm", "stablelm", _PLAIN_NORMS | dict(use_parallel_residual=True)),
    "nemotron": ("nemotron", "nemotron", dict(rope_parameters=_SHARE, hidden_act="relu2")),
    "gpt2": ("gpt2", "gpt2", _GPT2),
    "falcon": ("falcon", "falcon", dict(multi_query=True, alibi=False, num_kv_heads=1, ffn_hidden_size=512)),
    "falcon-groups": (
        "falcon", "falcon",
        dict(new_decoder_architecture=True, alibi=False, num_kv_heads=2, ffn_hidden_size=512, multi_query=False),
    ),
    "minimax-m2": (
        "minimax-m2", "minimax_m2",
        dict(head_dim=64, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_SHARE),
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, intermediate_size=256, sliding_window=16),
    ),
    "lfm2": (
        "lfm2", "lfm2",
        dict(
            num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], block_auto_adjust_ff_dim=False,
        ),
    ),
}  # fmt: skip
PACKAGE_QUANTISES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.F16, Type.BF16, Type.F32)
# The places of the float16 scale of a block, and of the scale of its minima.
_HALVES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.IQ3_S: (0,), Type.IQ2_XXS: (0,),
}  # fmt: skip
# A scale with which random blocks have values of about 0.25. Minima are scaled so that the mean is about 0.
_SCALES = {
    Type.Q2_K: (0.02, 0.03), Type.Q3_K: (0.006,), Type.Q4_K: (0.001, 0.0075), Type.Q5_K: (0.0005, 0.00775),
    Type.Q6_K: (0.0002,), Type.IQ4_NL: (0.004,), Type.IQ4_XS: (0.0002,), Type.IQ3_S: (0.002,), Type.IQ2_XXS: (0.002,),
}  # fmt: skip
_TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
# What tokens a tiny model has besides bytes; the third ends an answer.
_MARKERS = ("<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>")

KindOf = Callable[[str], Type]  # of the GGUF name of a matrix


def write_model(
    name: str, folder: Path, kind_of: KindOf | Type, *, tokenizer: Tokenizer | None = None, **overrides: Any
) -> tuple[Path, Path]:
    """(a GGUF file, a checkpoint in transformers' format with the weights that the file stands for, in float32).

    `kind_of`: the type of each matrix. `tokenizer`: byte-level; its vocabulary gives the model's.
    """
    tokenizer = tokenizer or byte_tokenizer()
    arch, model_type, fields = MODELS[name]
    shape = dict(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    config = CONFIG_MAPPING[model_type](**{**shape, **fields, **overrides})
    source = write_random_checkpoint(config, folder / f"{name}-source", seed=sum(name.encode()))
    plain = Path(shutil.copytree(source, folder / f"{name}-plain"))
    path = folder / f"{name}.gguf"
    weights = write_file(source, path, arch, kind_of if callable(kind_of) else lambda _: kind_of, tokenizer)
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    return path, plain


def write_file(
    source: Path, path: Path, arch: str, kind_of: KindOf, tokenizer: Tokenizer, **metadata: str
) -> dict[str, Tensor]:
    """Write the checkpoint `source` as a GGUF file. Returns the weights that the file stands for."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    _add_fields(writer, arch, config)
    add_byte_level(writer, tokenizer)
    for key, value in metadata.items():
        writer.add_string(key, value)
    weights = load_file(source / "model.safetensors")
    held = _write_weights(writer, arch, config, weights, kind_of)
    finish(writer)
    return held


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with GPT-2's way to split, a few merges and the special tokens _MARKERS."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(marker, special=True) for marker in _MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat there in the den"], trainer)
    return tokenizer


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    state = json.loads(tokenizer.to_str())
    special = {token["content"]: token for token in state["added_tokens"]}
    tokens = sorted(ids := tokenizer.get_vocab(), key=lambda token: ids[token])
    kinds = [
        gguf.TokenType.NORMAL
        if token not in special
        else gguf.TokenType.CONTROL
        if special[token]["special"]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(_TEMPLATE)


def quantise(values: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """The rows of a matrix as stored bytes; random blocks for types that the package cannot quantise to."""
    if kind in PACKAGE_QUANTISES:
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    count = values.size // block
    stored = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place, scale in zip(_HALVES[kind], _SCALES[kind], strict=True):
        halves = rng.uniform(0.5, 1.5, (count, 1)) * scale
        stored[:, place : place + 2] = halves.astype(np.float16).view(np.uint8)
    if kind in (Type.Q4_K, Type.Q5_K):
        stored[0, 4:16] = 0  # groups whose scale and minimum are 0
        stored[-1, 4:8] = 0  # groups whose scale is 0, with minima
        stored[-1, 12:16] &= 0xF0
    return stored.reshape(*values.shape[:-1], -1)


def _add_fields(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    if arch == "gpt2":
        _add_gpt2_fields(writer, config)
        return
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    names = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps: Any = config["norm_eps"] if arch == "nemotron" else next((config[key] for key in names if key in config), None)
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    writer.add_vocab_size(config["vocab_size"])
    kv_heads: Any = config.get("num_kv_heads" if arch == "falcon" else "num_key_value_heads")
    if arch == "lfm2":
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(kv_heads)
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, width))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _add_gpt2_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _llama3_divisors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for place in range(0, width, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (place / width)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _write_weights(
    writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any], weights: dict[str, Tensor], kind_of: KindOf
) -> dict[str, Tensor]:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.get("num_hidden_layers") or config["n_layer"])
    is_transposed = arch == "gpt2"
    held: dict[str, Tensor] = {}
    experts: dict[str, dict[int, str]] = {}
    for seed, (name, tensor) in enumerate(sorted(weights.items())):
        parts = name.split(".")
        if arch == "gpt-oss" and "experts" in parts:
            held[name] = _store_gpt_oss(writer, name, tensor.float().numpy(), kind_of, seed)
            continue
        if "experts" in parts:  # stacked below
            place = parts.index("experts") + 1
            index = int(parts.pop(place))
            experts.setdefault(".".join(parts), {})[index] = name
            continue
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        found += ".weight" if found.endswith("attn_sinks") else ""
        values = tensor.float().numpy()
        order = None
        if arch in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            order = np.arange(len(values)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
            values = values[order]
        if arch == "falcon" and "query_key_value" in name:
            groups = config["num_kv_heads"]
            by_head = np.arange(len(values)).reshape(groups, config["num_attention_heads"] // groups + 2, -1)
            order = np.concatenate([by_head[:, :-2].ravel(), by_head[:, -2].ravel(), by_head[:, -1].ravel()])
            values = values[order]
        is_shifted = arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith(
            ("norm.weight", "layernorm.weight")
        )
        if is_shifted:
            values = values + 1
        if name.endswith("conv.conv.weight"):
            values = values[:, 0]
        if is_transposed and values.ndim == 2 and ".h." in name:
            values = values.T
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        back = _store(writer, found, values, kind_of, seed)
        if is_transposed and values.ndim == 2 and ".h." in name:
            back = back.T.copy()
        if order is not None:
            back = back[np.argsort(order)]
        held[name] = torch.from_numpy(back - 1 if is_shifted else back).reshape(tensor.shape)
    for seed, (merged, by_index) in enumerate(experts.items()):
        found = names.get_name(merged, try_suffixes=(".weight",))
        assert found is not None, merged
        values = np.stack([weights[by_index[index]].float().numpy() for index in range(len(by_index))])
        back = _store(writer, found, values, kind_of, 1000 + seed)
        held |= {by_index[index]: torch.from_numpy(back[index].copy()) for index in range(len(by_index))}
    return held


def _store_gpt_oss(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind_of: KindOf, seed: int) -> Tensor:
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
        kind = (lambda _: Type.F32) if is_bias else kind_of
        found.append(_store(writer, gguf_name, np.ascontiguousarray(part), kind, 1000 * (place + 1) + seed))
    back = found[0] if len(found) == 1 else np.stack(found, axis=2).reshape(values.shape)
    return torch.from_numpy(back if is_bias else back.swapaxes(1, 2).copy())


def _store(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind_of: KindOf, seed: int) -> np.ndarray:
    """Add a tensor. Returns the values that it stands for."""
    is_matrix = values.ndim > 1 and "conv" not in name and "ffn_gate_inp" not in name
    kind = kind_of(name) if is_matrix else Type.F32
    stored = quantise(values, kind, seed)
    writer.add_tensor(name, stored, raw_dtype=kind)
    return gguf.quants.dequantize(stored, kind).astype(np.float32)
