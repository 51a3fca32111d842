"""BlockLayout: the byte offsets of each layer's keys and values inside one block of the KV pool.

A rank's pool is uint8 [num_blocks, bytes_per_block]. A block holds `block_size` tokens of every layer in one piece, so
that one copy moves it:

    elements of each layer     K [kv_heads, block_size, head_dim], V [kv_heads, block_size, value_dim]
    scales of each layer       K [kv_heads, block_size], V the same; float16, only if the elements are quantised

Layers may differ in heads and head_dim. V is absent where values are part of the keys (MLA). `kv_memory.py` makes
tensors of the offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import SCALE_BYTES, KvDtype
from coatcheck.workers.core.model_spec import LayerSpec

_ALIGNMENT = 64  # a cache line; of every block and every K and V
_SCALES_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class LayerSlab:
    """Byte offsets of one layer inside a block. Those of scales have no meaning without quantisation."""

    k_offset: int
    v_offset: int
    k_scales_offset: int
    v_scales_offset: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    block_size: int
    kv_dtype: KvDtype
    slabs: tuple[LayerSlab, ...]
    bytes_per_block: int

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], block_size: int, kv_dtype: KvDtype) -> Self:
        """Raises InvalidConfig for int4 and an odd head_dim, because a byte holds two elements."""
        offsets, offset = list[tuple[int, int]](), 0
        for index, layer in enumerate(layers):
            odd = next((dim for dim in (layer.head_dim, layer.value_dim) if dim % 2), None)
            if kv_dtype.bits < 8 and odd is not None:
                raise InvalidConfig(
                    f"kv-dtype {kv_dtype} packs two elements in a byte, and layer {index} has head_dim "
                    f"{odd}, which is odd; use int8 or fp8"
                )
            rows = layer.num_kv_heads * block_size
            v_offset = offset + _aligned(rows * layer.head_dim * kv_dtype.bits // 8, _ALIGNMENT)
            offsets.append((offset, v_offset))
            offset = v_offset + _aligned(rows * layer.value_dim * kv_dtype.bits // 8, _ALIGNMENT)
        slabs = []
        for (k_offset, v_offset), layer in zip(offsets, layers, strict=True):
            size = layer.num_kv_heads * block_size * SCALE_BYTES if kv_dtype.is_quantised else 0
            size = _aligned(size, _SCALES_ALIGNMENT)
            heads, dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.value_dim
            slabs.append(LayerSlab(k_offset, v_offset, offset, offset + size, heads, dim, value_dim))
            offset += 2 * size if value_dim else size
        return cls(block_size, kv_dtype, tuple(slabs), _aligned(offset, _ALIGNMENT))

    @property
    def scale_bytes_per_token(self) -> float:
        """The part of `bytes_per_token` that scales take."""
        scale_bytes = self.bytes_per_block - self.slabs[0].k_scales_offset
        return scale_bytes / self.block_size if self.kv_dtype.is_quantised else 0.0

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token on this rank, scales and padding included."""
        return self.bytes_per_block / self.block_size


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
