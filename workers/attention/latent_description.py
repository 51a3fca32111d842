"""LatentDescription: how a module of latent attention (MLA) computes, read from transformers' module and its config.

A module is latent attention if it has DeepSeek's projections. Model types differ in

    queries   one projection (q_proj), or two with a norm between them (q_a_proj, q_a_layernorm, q_b_proj)
    RoPE      the elements of a rotated pair are neighbours, or half of qk_rope_head_dim apart (config.rope_interleave)
    scales    LongCat multiplies the normalised latent of queries, and that of keys and values, by a constant each
"""

from dataclasses import dataclass
from typing import Any, Final, Self

_KV_MODULES: Final = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "kv_lora_rank", "qk_rope_head_dim")
_QUERY_MODULES: Final = ("q_a_proj", "q_a_layernorm", "q_b_proj")


@dataclass(frozen=True, slots=True)
class LatentDescription:
    """`rank`, `rope`: elements of a latent and of a rotary key. `has_query_latent`: queries have two projections.

    `is_interleaved`: the elements of a rotated pair are neighbours. `query_scale`, `latent_scale`: factors of the
    normalised latent of queries, and of the normalised latent of keys and values.
    """

    rank: int
    rope: int
    has_query_latent: bool
    is_interleaved: bool
    query_scale: float = 1.0
    latent_scale: float = 1.0

    @classmethod
    def of(cls, module: Any) -> Self | None:
        """The description of `module`; None if it is no latent attention."""
        if not all(hasattr(module, name) for name in _KV_MODULES):
            return None
        has_query_latent = all(getattr(module, name, None) is not None for name in _QUERY_MODULES)
        if not has_query_latent and getattr(module, "q_proj", None) is None:
            return None
        return cls(
            int(module.kv_lora_rank),
            int(module.qk_rope_head_dim),
            has_query_latent,
            is_interleaved=bool(getattr(module.config, "rope_interleave", True)),  # as do types without the field
            query_scale=float(getattr(module, "mla_scale_q_lora", 1.0)),
            latent_scale=float(getattr(module, "mla_scale_kv_lora", 1.0)),
        )
