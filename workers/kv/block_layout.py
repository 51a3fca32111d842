"""BlockLayout: where each layer's keys and values lie inside one block of the KV pool.

The pool of a rank is uint8 [num_blocks, bytes_per_block]; a block holds block_size tokens of every layer, contiguous,
so that moving it is one copy. First the elements, layer by layer: K [kv_heads, block_size, head_dim], then V the same
(narrower, or absent where values lie in the keys); then, where elements are quantised, the scales of all layers,
float16: K [kv_heads, block_size], then V. Layers may differ in heads and head_dim. Pure arithmetic without torch:
kv_pool.py makes tensors of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import SCALE_BYTES, KvDtype
from coatcheck.workers.core.model_spec import LayerSpec

_ALIGNMENT = 64  # one cache line: every slab of elements starts on its own, and so does every block
_SCALES_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class LayerSlab:
    """Byte offsets of one layer's parts inside a block; those of scales mean nothing where there are none."""

    k_offset: int
    v_offset: int
    k_scales_offset: int
    v_scales_offset: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of a block: the same on every rank of a group whose heads divide evenly."""

    block_size: int
    kv_dtype: KvDtype
    slabs: tuple[LayerSlab, ...]
    bytes_per_block: int

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], block_size: int, kv_dtype: KvDtype) -> Self:
        """Raises InvalidConfig for int4 where a head_dim is odd: its elements come in pairs."""
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
        """How much of `bytes_per_token` are scales; they lie behind the elements of all layers."""
        behind = self.bytes_per_block - self.slabs[0].k_scales_offset
        return behind / self.block_size if self.kv_dtype.is_quantised else 0.0

    @property
    def bytes_per_token(self) -> float:
        """KV bytes that one token takes on this rank, scales and padding included."""
        return self.bytes_per_block / self.block_size


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
