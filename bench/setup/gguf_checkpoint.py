"""Writes the checkpoint of checkpoint.py as a GGUF file, for llama.cpp.

llama.cpp's own converter accepts only tokenizers that it knows, so the file is written here, with the writer of its
`gguf` package (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import json
from pathlib import Path
from typing import Any, Literal

import gguf
from safetensors.torch import load_file
from torch import Tensor

WeightType = Literal["bf16", "q8_0"]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Path, path: Path, weights: WeightType) -> Path:
    """Write the llama checkpoint in the folder `checkpoint` to `path` unless that file exists."""
    if path.exists():
        return path
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        _add_tensor(writer, name, tensor, config, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.replace(path)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocabulary, **special}.items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens])
    kinds = (gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in tokens)
    writer.add_token_types(list(kinds))
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: dict[str, Any], weights: WeightType
) -> None:
    """Norms stay float32. Rows of queries and keys are reordered: GGUF's llama rotates neighbouring pairs."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    values = tensor.float().contiguous().numpy()
    if tensor.dim() == 1:
        writer.add_tensor(_gguf_name(name), values)
        return
    kind = gguf.GGMLQuantizationType.BF16 if weights == "bf16" else gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name] + ".weight"
