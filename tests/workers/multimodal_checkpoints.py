"""Tiny random multimodal checkpoints, for the tests of several rooms.

`write_multimodal(name, directory)` writes one with transformers' own class, which gives tensors their published names.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForImageTextToText, Gemma3nVisionConfig, PreTrainedModel

from coatcheck.workers.verification.random_model import randomise
from tests.workers.checkpoints import VOCAB

TEXT_FIELDS: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_SHARED = dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
VISION_FIELDS = dict(hidden_size=32, image_size=28, patch_size=14, **_SHARED)
_CLIP = dict(model_type="clip_vision_model", **VISION_FIELDS)
_INTERN = dict(hidden_size=32, image_size=[28, 28], patch_size=[14, 14], **_SHARED)
_LLAMA4 = _EXPERTS | dict(attention_chunk_size=256, intermediate_size_mlp=96)
_IDS = dict(image_token_id=5, image_token_index=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
_QWEN = dict(depth=1, hidden_size=32, embed_dim=32, num_heads=2, intermediate_size=32, out_hidden_size=64,
             deepstack_visual_indexes=[0], fullatt_block_indexes=[0])  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"] * 2
# Gemma 3n and 4: embeddings for each layer, and layers 2 and 3 read the keys and values of layers 0 and 1.
_PER_LAYER = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2)
_GEMMA4 = dict(layer_types=_MIXED, sliding_window=16, global_head_dim=32, final_logit_softcapping=30.0)
_GEMMA4_TOWER = dict(hidden_size=32, head_dim=16, num_key_value_heads=2, **_SHARED)
_GEMMA4_AUDIO = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[8, 4])
_GEMMA3N_AUDIO = dict(vocab_size=4, vocab_offset=VOCAB + 4, hidden_size=32, conf_num_hidden_layers=1,
                      conf_num_attention_heads=2, sscp_conv_channel_size=[8, 4])  # fmt: skip
# Multimodal type -> (fields of text_config, of vision_config, of the whole).
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "aya_vision": (dict(model_type="cohere2", sliding_window=16), VISION_FIELDS, {}),
    "cohere2_vision": (dict(model_type="cohere2", sliding_window=16), VISION_FIELDS, {}),
    "gemma3": (dict(sliding_window=16, query_pre_attn_scalar=16, sliding_window_pattern=2), VISION_FIELDS, {}),
    "gemma3n": (
        _PER_LAYER | dict(layer_types=_MIXED, sliding_window=16, laurel_rank=8, intermediate_size=[96] * 4,
                          activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0]),
        dict(vocab_size=4, vocab_offset=VOCAB, hidden_size=32),
        dict(audio_config=_GEMMA3N_AUDIO),
    ),
    "gemma4": (
        _GEMMA4 | _PER_LAYER | dict(use_double_wide_mlp=True), _GEMMA4_TOWER, dict(audio_config=_GEMMA4_AUDIO)
    ),
    "gemma4-dense": (
        _GEMMA4 | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
                       use_bidirectional_attention="vision"),
        _GEMMA4_TOWER, {},
    ),
    "gemma4-experts": (
        _GEMMA4 | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
                       enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32),
        _GEMMA4_TOWER, {},
    ),
    "gemma4_unified": (
        _GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
        dict(mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=64), dict(audio_config=dict(audio_embed_dim=32)),
    ),
    "idefics3": (dict(model_type="llama"), VISION_FIELDS, {}),
    "internvl": (dict(model_type="qwen2"), _INTERN, {}),
    "llama4": (_LLAMA4, VISION_FIELDS | dict(vision_output_dim=32), {}),
    "llava": (dict(model_type="llama"), _CLIP, {}),
    "llava_next": (dict(model_type="mistral", sliding_window=16), _CLIP, {}),
    "mistral3": (dict(model_type="mistral", sliding_window=None), dict(model_type="pixtral", **VISION_FIELDS), {}),
    "mistral3-ministral3": (dict(model_type="ministral3"), dict(model_type="pixtral", **VISION_FIELDS), {}),
    "qwen2_vl": (dict(rope_parameters=_MROPE), _QWEN, {}),
    "qwen2_5_vl": (dict(rope_parameters=_MROPE), _QWEN, {}),
    "qwen3_vl": (dict(rope_parameters=_MROPE | dict(mrope_interleaved=True)), _QWEN, dict(tie_word_embeddings=True)),
    "qwen3_vl_moe": (dict(rope_parameters=_MROPE) | _EXPERTS, _QWEN, {}),
    "smolvlm": (dict(model_type="llama"), VISION_FIELDS, {}),
}  # fmt: skip


class _VisionTower(PreTrainedModel):
    """Takes the place of Gemma 3n's vision tower, for which transformers needs the package timm."""

    config_class = Gemma3nVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.conv = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


AutoModel.register(Gemma3nVisionConfig, _VisionTower, exist_ok=True)


def multimodal_config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


def write_multimodal(name: str, directory: Path) -> Path:
    """A tiny random multimodal checkpoint, written by transformers with the published names of its tensors."""
    text, vision, whole = TOWERS[name]
    model_type = name.partition("-")[0]
    config = multimodal_config(model_type, text_config=TEXT_FIELDS | text, vision_config=vision, **_IDS, **whole)
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(directory)
    return directory
