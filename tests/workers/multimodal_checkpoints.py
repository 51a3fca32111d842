"""Tiny random multimodal checkpoints, for the tests of several rooms.

`write_multimodal(name, directory)` writes one with transformers' own class, which gives tensors their published names.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMultimodalLM, Gemma3nVisionConfig, PreTrainedModel

from coatcheck.workers.verification.random_model import randomise
from tests.workers.checkpoints import VOCAB

TEXT_FIELDS: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_DELTA_NETS = dict(
    rope_parameters=_MROPE | dict(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
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
_MROPE_HALF = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
_GLM = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=64, image_size=28)
_LATENT = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
    num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
)  # fmt: skip
_SIGLIP = dict(model_type="siglip_vision_model", **VISION_FIELDS)
_AUDIO = dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32)
_OMNI_AUDIO = _AUDIO | dict(output_dim=64, n_window=4)
_QFORMER = dict(encoder_hidden_size=32, **VISION_FIELDS)
_SPEECH = dict(
    encoder_config=dict(hidden_dim=32, num_layers=1, num_heads=2, dim_head=16, output_dim=4),
    projector_config=_QFORMER,
)
_VQ = dict(base_channels=32, latent_channels=32, embed_dim=8, num_embeddings=16, image_token_embed_dim=64)
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
    "qwen2_5_omni_thinker": (dict(rope_parameters=_MROPE), _QWEN, dict(audio_config=_OMNI_AUDIO)),
    "qwen3_omni_moe_thinker": (
        dict(rope_parameters=_MROPE) | _EXPERTS, _QWEN, dict(audio_config=_OMNI_AUDIO | dict(downsample_hidden_size=8)),
    ),
    "qwen2_vl": (dict(rope_parameters=_MROPE), _QWEN, {}),
    "qwen2_5_vl": (dict(rope_parameters=_MROPE), _QWEN, {}),
    "qwen3_5": (_DELTA_NETS, _QWEN, dict(tie_word_embeddings=True)),
    "qwen3_5_moe": (_DELTA_NETS | _EXPERTS | dict(shared_expert_intermediate_size=32), _QWEN, {}),
    "qwen3_vl": (dict(rope_parameters=_MROPE | dict(mrope_interleaved=True)), _QWEN, dict(tie_word_embeddings=True)),
    "qwen3_vl_moe": (dict(rope_parameters=_MROPE) | _EXPERTS, _QWEN, {}),
    "smolvlm": (dict(model_type="llama"), VISION_FIELDS, {}),
    "aria": (
        _EXPERTS | dict(model_type="aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        VISION_FIELDS, {},
    ),
    "cohere_compass": (
        dict(rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in _MIXED}, layer_types=_MIXED,
             sliding_window=16),
        _QWEN, {},
    ),
    "deepseek_vl": (dict(model_type="llama"), VISION_FIELDS, {}),
    "deepseek_vl_hybrid": (
        dict(model_type="llama"), VISION_FIELDS,
        dict(high_res_vision_config=dict(global_attn_indexes=[0], output_channels=8, mlp_dim=32, **VISION_FIELDS)),
    ),
    "exaone4_5": (dict(model_type="exaone4", sliding_window=16), _QWEN | dict(num_key_value_heads=2), {}),
    "fuyu": (dict(model_type="persimmon"), {}, {}),
    "glm46v": (dict(model_type="glm4v_text", rope_parameters=_MROPE_HALF), _GLM, {}),
    "glm4v": (dict(rope_parameters=_MROPE_HALF), _GLM, {}),
    "glm4v_moe": (_EXPERTS | dict(rope_parameters=_MROPE_HALF, n_routed_experts=4, first_k_dense_replace=1), _GLM, {}),
    "granite4_vision": (
        dict(residual_multiplier=0.5, embedding_multiplier=3.0), _CLIP | dict(hidden_size=64),
        dict(qformer_config=_QFORMER | dict(hidden_size=64, encoder_hidden_size=64), downsample_rate="1/2",
             deepstack_layer_map=[[-1, 1]], spatial_target_layers=[0, 1, 2, 3]),
    ),
    "granite_speech": (dict(model_type="granite", embedding_multiplier=3.0), {}, _SPEECH),
    "granite_speech_plus": (dict(model_type="granite", logits_scaling=2.0), {}, _SPEECH),
    "hunyuan_vl": (dict(rope_parameters=_MROPE), VISION_FIELDS | dict(text_hidden_size=64, out_hidden_size=64), {}),
    "hyperclovax_vision_v2": (dict(model_type="hyperclovax"), _QWEN | dict(model_type="qwen2_5_vl"), {}),
    "idefics2": (
        dict(model_type="mistral", sliding_window=None), VISION_FIELDS,
        dict(perceiver_config=dict(resampler_depth=1, resampler_n_heads=2, resampler_head_dim=16, num_key_value_heads=1,
                                   hidden_size=64)),
    ),
    "janus": (
        dict(model_type="llama"), VISION_FIELDS | dict(projection_dim=64),
        dict(vq_config=_VQ | dict(projection_dim=64)),
    ),
    "kimi_k25": (_EXPERTS | _LATENT, VISION_FIELDS, dict(projection_hidden_size=32)),
    "llava_next_video": (dict(model_type="llama"), _CLIP, {}),
    "llava_onevision": (dict(model_type="qwen2"), _SIGLIP, {}),
    "ovis2": (dict(model_type="qwen2"), VISION_FIELDS | dict(vocab_size=16), {}),
    "qwen2_audio": (dict(model_type="qwen2"), {}, dict(audio_config=_AUDIO)),
    "video_llama_3": (dict(model_type="qwen2"), VISION_FIELDS, {}),
    "video_llava": (dict(model_type="llama"), _CLIP, {}),
    "vipllava": (dict(model_type="llama"), _CLIP, dict(vision_feature_layers=[-1])),
    "voxtral": (dict(model_type="llama"), {}, dict(audio_config=VISION_FIELDS)),
}  # fmt: skip


class _VisionTower(PreTrainedModel):
    """Takes the place of Gemma 3n's vision tower, for which transformers needs the package timm."""

    config_class = Gemma3nVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.conv = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


# AutoModel.register of transformers 5.17 does nothing for transformers' own config classes.
AutoModel._model_mapping._extra_content[Gemma3nVisionConfig] = _VisionTower  # type: ignore[attr-defined]


def multimodal_config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


def write_multimodal(name: str, directory: Path) -> Path:
    """A tiny random multimodal checkpoint, written by transformers with the published names of its tensors."""
    text, vision, whole = TOWERS[name]
    model_type = name.partition("-")[0]
    towers = dict(vision_config=vision) if vision else {}
    config = multimodal_config(model_type, text_config=TEXT_FIELDS | text, **towers, **_IDS, **whole)
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(directory)
    if model_type == "kimi_k25":  # transformers renames the text model's layers as if they were the vision tower's
        file = directory / "model.safetensors"
        tensors = {key.replace("model.blocks.", "model.layers."): tensor for key, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return directory
