"""The tensors of one rank's KV blocks: the pool on its device, each layer's view of it, and the host tier's memory."""

import math
import weakref
from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor

from coatcheck.kernels import huge_pages
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import LayerCaches
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.kv.block_layout import BlockLayout, LayerOffsets

_TORCH_DTYPES: Final = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.FP8: torch.float8_e4m3fn,
    KvDtype.INT8: torch.int8,
    KvDtype.INT4: torch.uint8,  # two values a byte
}


def allocate_kv_pool(layout: BlockLayout, num_blocks: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, bytes_per_block], zeroed.

    On CPU it lies on huge pages, because a decode step reads blocks that lie anywhere, and a thread allocates the pages
    while the rank already serves: Linux takes up to a second to zero 1 GiB, and up to three on a virtual machine whose
    host must first find the memory. Raises InvalidConfig if this process cannot have that much memory.
    """
    if device.type == "cpu":
        try:
            pool = huge_pages.zeros((num_blocks, layout.bytes_per_block), torch.uint8)
        except (OSError, OverflowError) as error:
            raise _no_memory("kv-memory", num_blocks * layout.bytes_per_block, error) from None
        huge_pages.populate_in_background(pool)
        return pool
    return torch.zeros(num_blocks, layout.bytes_per_block, dtype=torch.uint8, device=device)


def allocate_host_pool(num_blocks: int, bytes_per_block: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, bytes_per_block] in host memory, zeroed; pinned if `device` is a GPU.

    Raises InvalidConfig if this process cannot have that much memory, or the driver refuses to pin that much.
    """
    try:
        host = torch.empty(num_blocks, bytes_per_block, dtype=torch.uint8).zero_()
    except RuntimeError:  # torch's message ends with its own stack
        raise _no_memory("host-kv-memory", num_blocks * bytes_per_block, "Cannot allocate memory") from None
    if device.type == "cuda":
        # torch's own pinned memory would round every size up to a power of two.
        runtime = torch.cuda.cudart()
        failure = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if failure:
            raise InvalidConfig(
                f"host-kv-memory: the driver cannot pin {host.nbytes:,} bytes (CUDA error {failure}); use less"
            )
        weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host


def _no_memory(setting: str, size: int, why: object) -> InvalidConfig:
    return InvalidConfig(
        f"{setting}: the system refuses {size:,} bytes ({why}); use less, or raise this process's limit (`ulimit -v`)"
    )


def make_layer_caches(layout: BlockLayout, pool: Tensor) -> list[KVCache]:
    """Each layer's keys, values and scales as strided views of `pool`.

    Raises ValueError if a layer's value_dim is not its head_dim: attention kernels need equal sizes.
    """
    for layer in layout.layers:
        spec = layer.spec
        if spec.value_dim != spec.head_dim:
            raise ValueError(f"value_dim is {spec.value_dim} and head_dim {spec.head_dim}; they must be equal")
    return [KVCache(*_layer_views(layout, layer, pool)) for layer in layout.layers]


def make_latent_caches(layout: BlockLayout, pool: Tensor) -> list[LatentCache]:
    """The same for a model with latent attention: latents, rotary keys and scales."""
    return [LatentCache(*_layer_views(layout, layer, pool)) for layer in layout.layers]


def make_caches(layout: BlockLayout, pool: Tensor) -> list[KVCache] | list[LatentCache]:
    """Those of `make_latent_caches` if the layers are latent, else those of `make_layer_caches`."""
    is_latent = any(layer.spec.is_latent for layer in layout.layers)
    return make_latent_caches(layout, pool) if is_latent else make_layer_caches(layout, pool)


def make_states(spec: ModelSpec, num_slots: int, device: torch.device) -> list[RecurrentState]:
    """The state of each layer of `spec.state_layers`, zeroed. `num_slots`: those of running sequences and of snapshots.

    On CPU they lie in one range of huge pages, which a thread allocates as it does the pool's: pages that were
    allocated at a slot's first use would look free to a group that starts later on this host. Raises InvalidConfig if
    this process cannot have that much memory.
    """
    if not spec.state_layers:
        return []
    size = num_slots * spec.state_bytes
    try:
        memory = (
            huge_pages.zeros((size,), torch.uint8)
            if device.type == "cpu"
            else torch.zeros(size, dtype=torch.uint8, device=device)
        )
    except (OSError, OverflowError) as error:
        raise _no_memory("max-num-seqs", size, error) from None
    if device.type == "cpu":
        huge_pages.populate_in_background(memory)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    # The matrices first: their sizes keep the alignment.
    shapes = [(num_slots, *layer.matrix) for layer in spec.state_layers if layer.matrix is not None]
    taken, memory = _take_tensors(memory, shapes, torch.float32)
    windows, _ = _take_tensors(memory, [(num_slots, *layer.window) for layer in spec.state_layers], dtype)
    matrices = iter(taken)
    return [
        RecurrentState(window, None if layer.matrix is None else next(matrices))
        for window, layer in zip(windows, spec.state_layers, strict=True)
    ]


def _take_tensors(memory: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Tensors of `shapes` from the front of `memory`, uint8 [n], and what is left of it."""
    tensors: list[Tensor] = []
    for shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(memory[:size].view(dtype).view(shape))
        memory = memory[size:]
    return tensors, memory


def add_states(caches: LayerCaches, states: Sequence[RecurrentState]) -> LayerCaches:
    """The caches of the layers with attention, and then the states of the layers that have one."""
    return cast("LayerCaches", [*caches, *states]) if states else caches


def _layer_views(layout: BlockLayout, layer: LayerOffsets, pool: Tensor) -> list[Tensor]:
    """K and V (latent and rotary key), and if quantised the scales of each."""
    spec, dtype = layer.spec, _TORCH_DTYPES[layout.kv_dtype]
    rows = (spec.num_kv_heads, layout.block_size // spec.token_shards)
    views = [
        _view(pool, dtype, offset, (*rows, dim * layout.kv_dtype.bits // (8 * dtype.itemsize)))
        for offset, dim in zip((layer.k, layer.v), spec.stored_dims, strict=True)
    ]
    if layout.kv_dtype.is_quantised:
        views += [_view(pool, torch.float16, offset, rows) for offset in (layer.k_scales, layer.v_scales)]
    return views


def _view(pool: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    """[num_blocks, *shape]: the `dtype` values that start `offset` bytes into every block."""
    typed, start, size = pool.view(dtype), offset // dtype.itemsize, math.prod(shape)
    return typed[:, start : start + size].view(-1, *shape)
