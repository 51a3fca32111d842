"""config.json files as models have them, for the tests of sizing."""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
DEEPSEEK: dict[str, Any] = dict(
    model_type="deepseek_v3",
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=129280,
    max_position_embeddings=163840,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)


def write_config(directory: Path, base: dict[str, Any] = LLAMA, **changes: Any) -> str:
    """Writes `base` with `changes` (None: without that field) as a model's directory, and returns it."""
    values = {name: value for name, value in {**base, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)
