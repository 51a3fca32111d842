"""BlockLayout: the byte offsets of each layer's keys and values inside one block of the KV pool.

A rank's pool is uint8 [num_blocks, bytes_per_block]. A block is contiguous and holds `block_size` tokens of every
layer, so one copy moves it:

    elements of each layer     K [kv_heads, block_size, head_dim], V [kv_heads, block_size, value_dim]
    scales of each layer       K [kv_heads, block_size], V the same; float16, only if the elements are quantised

The elements of all layers come first, then the scales of all layers. Layers may differ in heads and head_dim. With
latent attention (MLA), K is the latent [1, block_size, kv_lora_rank], and V is the rotary key [1, block_size,
qk_rope_head_dim]. Each has its own scales, because the latent is normalised and the rotary key is not. With --mla-shard
tokens a rank's block holds block_size / token_shards of the block's tokens. A layer that reads the keys and values of
an earlier layer has that layer's offsets, and takes no bytes. `kv_memory.py` makes tensors from the offsets.

A model without attention (Mamba) has no layers here. Its blocks hold nothing: they count tokens, and prefixes and
snapshots of states refer to them. A block still has 64 bytes, so that pools and copies need no case of their own.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import SCALE_BYTES, KvDtype
from coatcheck.workers.core.model_spec import LayerSpec

_ALIGNMENT = 64  # bytes, a cache line: of every block, every K and every V
_SCALES_ALIGNMENT = 16  # bytes
# The most blocks of a model without attention. Each takes a few hundred bytes of rank 0's own memory: with blocks of 16
# tokens they hold 4 million tokens.
_MAX_EMPTY_BLOCKS = 1 << 18


@dataclass(frozen=True, slots=True)
class LayerOffsets:
    """Byte offsets of one layer inside a block. `k_scales`, `v_scales`: only of a quantised pool."""

    spec: LayerSpec
    k: int
    v: int
    k_scales: int
    v_scales: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    block_size: int
    kv_dtype: KvDtype
    layers: tuple[LayerOffsets, ...]
    bytes_per_block: int

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], block_size: int, kv_dtype: KvDtype) -> Self:
        """The layout of a rank's blocks for the attention layers `specs`.

        Raises InvalidConfig if int4 meets an odd head_dim (a byte holds two elements), or if a layer's token_shards
        does not divide `block_size`.
        """
        element_bytes, scale_bytes = list[int](), list[int]()  # of K and V of each layer that stores its own
        stored = {index: spec for index, spec in enumerate(specs) if spec.kv_source is None}
        for index, spec in stored.items():
            if block_size % spec.token_shards:
                raise InvalidConfig(
                    f"mla-shard tokens divides the tokens of a block over the ranks: tp {spec.token_shards} does not "
                    f"divide block-size {block_size}; use a block-size that is a multiple of {spec.token_shards}"
                )
            for dim in spec.stored_dims:
                if kv_dtype.bits < 8 and dim % 2:
                    raise InvalidConfig(
                        f"kv-dtype {kv_dtype} packs two elements in a byte, and layer {index} has head_dim "
                        f"{dim}, which is odd; use int8 or fp8"
                    )
                rows = spec.num_kv_heads * block_size // spec.token_shards
                element_bytes.append(_aligned(rows * dim * kv_dtype.bits // 8, _ALIGNMENT))
                has_scales = kv_dtype.is_quantised and dim
                scale_bytes.append(_aligned(rows * SCALE_BYTES, _SCALES_ALIGNMENT) if has_scales else 0)
        offsets = list(accumulate((*element_bytes, *scale_bytes), initial=0))
        elements, scales = offsets[: 2 * len(stored)], offsets[2 * len(stored) : -1]
        parts = zip(elements[::2], elements[1::2], scales[::2], scales[1::2], strict=True)
        offsets_of = dict(zip(stored, parts, strict=True))
        layers = tuple(
            LayerOffsets(spec, *offsets_of[index if spec.kv_source is None else spec.kv_source])
            for index, spec in enumerate(specs)
        )
        return cls(block_size, kv_dtype, layers, _aligned(max(offsets[-1], 1), _ALIGNMENT))

    @property
    def max_blocks(self) -> int:
        """The most blocks of a pool, however much memory there is."""
        return sys.maxsize if self.layers else _MAX_EMPTY_BLOCKS

    @property
    def scale_bytes_per_token(self) -> float:
        """The part of `bytes_per_token` that scales take; 0 without quantisation."""
        if not self.kv_dtype.is_quantised or not self.layers:
            return 0.0
        return (self.bytes_per_block - self.layers[0].k_scales) / self.block_size

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token on this rank, scales and padding included."""
        return self.bytes_per_block / self.block_size


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
