"""Causal attention over a paged KV cache: prefills, chunks and decodes in one batch.

    out[i] = softmax(mask(cap(scale * q[i] @ K^T))) @ V

K and V are the sequence's keys and values, read through its block table. cap(x) = softcap * tanh(x / softcap) if
softcap > 0, else x. Query i of a sequence with q_len tokens in this step is at position p = seq_len - q_len + i, and
attends to the keys at positions p - sliding_window < j <= p, or to all j <= p if sliding_window is 0. With sinks,
exp(sinks[head]) is added to the denominator of the softmax.

Shapes: q, out [num_tokens, num_heads, head_dim] (the stride of q over tokens is free, out is contiguous); cache: see
kv_cache.py, of any dtype; block_tables int32 [num_seqs, max_blocks]; seq_lens int32 [num_seqs], including this step's
tokens; cu_seqlens_q int32 [num_seqs + 1]; sinks float32 [num_heads]. Rows of out from cu_seqlens_q[-1] on are not
computed.

With `batch_invariant` a query's result does not depend on other queries, and has the same bits in a decode and in a
prefill of any length. On a CPU that is always so. On a GPU splits and tiles then have one size (see attention_plan.py).

The Triton kernels (paged_tiles.py) compute CUDA tensors, kernels/csrc/attention computes CPU tensors, and the reference
below computes all others.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, launch_attention, make_plan
from coatcheck.kernels.attention.tile_launch import pick_tiles
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.launch_check import (
    FLOATS,
    check_dense,
    check_device,
    check_dtype,
    check_heads,
    check_rows,
    check_shape,
    refuse,
)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """The attention of every query, [num_tokens, num_heads, head_dim].

    `plan`: for the Triton kernels, made for these lengths. Without a plan the host waits for the device to read the
    lengths. `batch_invariant`: ignored if there is a plan, which was made for one mode.
    """
    check_tables(block_tables, seq_lens, cu_seqlens_q, cache.device)
    _check_query(q, cache, scale, sliding_window, softcap, sinks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if uses_triton(cache.k):
        if plan is None:
            starts = cu_seqlens_q.tolist()
            q_lens = [end - start for start, end in pairwise(starts)]
            tiles = pick_tiles(
                q.shape[1], cache.kv_heads, cache.head_dim, element_size=q.element_size(), pool_bits=cache.bits,
                gpu=gpu_properties(q.device), batch_invariant=batch_invariant,
            )  # fmt: skip
            plan = make_plan(q_lens, seq_lens.tolist(), tiles, sliding_window, q.device)
        launch_attention(q, cache, block_tables, plan, scale, sliding_window, softcap, sinks, out)
        return out
    library = native.library_for(q)
    if library is None or cache.head_dim % 16 or cache.head_dim > 256:
        paged_attention_reference(
            q, cache, block_tables, seq_lens, cu_seqlens_q, scale, sliding_window, softcap, sinks, out
        )
        return out
    arguments = native.ATTENTION.pack(
        q.data_ptr(), q.stride()[0], cache.pointer, block_tables.data_ptr(), block_tables.stride()[0],
        seq_lens.data_ptr(), cu_seqlens_q.data_ptr(), len(seq_lens), q.shape[1], scale, softcap, sliding_window,
        native.TYPES[q.dtype], 0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        cache.head_dim, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    if library.attention[q.dtype](arguments):
        raise native.out_of_memory("paged_attention")
    return out


_last_tables: tuple[Tensor, Tensor, Tensor, torch.device] | None = None


def check_tables(block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, device: torch.device) -> None:
    """Check the tensors of a step once. All layers of a step pass the same tensors, so these are remembered."""
    global _last_tables
    last = _last_tables
    if last and last[0] is block_tables and last[1] is seq_lens and last[2] is cu_seqlens_q and last[3] == device:
        return
    check_shape("block_tables", block_tables, (None, None))
    num_seqs = block_tables.shape[0]
    check_rows("block_tables", block_tables)
    check_dtype("block_tables", block_tables, torch.int32)
    check_device("block_tables", block_tables, device)
    check_dense("seq_lens", seq_lens, (num_seqs,), torch.int32, device)
    check_dense("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32, device)
    _last_tables = (block_tables, seq_lens, cu_seqlens_q, device)


def _check_query(
    q: Tensor, cache: KVCache, scale: float, sliding_window: int, softcap: float, sinks: Tensor | None
) -> None:
    check_dtype("q", q, *FLOATS)
    check_heads("q", q, (None, None, cache.head_dim), q.dtype, cache.device)
    num_heads = q.shape[1]
    if cache.kv_heads == 0 or num_heads % cache.kv_heads:
        refuse("q", f"a multiple of k_cache's {cache.kv_heads} heads", num_heads)
    if not scale > 0.0:
        refuse("scale", "a positive number", scale)
    if sliding_window < 0:
        refuse("sliding_window", "0 (off) or a positive number of keys", sliding_window)
    if not softcap >= 0.0:
        refuse("softcap", "0 (off) or a positive cap", softcap)
    if sinks is not None:
        check_dense("sinks", sinks, (num_heads,), torch.float32, cache.device)


def paged_attention_reference(
    q: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attention in float32, one sequence at a time, written to `out`. All other forms are tested against it."""
    block_size, groups = cache.block_size, q.shape[1] // cache.kv_heads
    starts = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        keys, values = (rows[:, :seq_len].repeat_interleave(groups, dim=0) for rows in cache.rows_reference(blocks))
        scores = scale * (q[first:last].float().transpose(0, 1) @ keys.transpose(1, 2))  # [heads, q_len, seq_len]
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(seq_len - (last - first), seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)[None]
        hidden = key_position > position
        if sliding_window > 0:
            hidden |= key_position <= position - sliding_window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, last - first, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        out[first:last] = (weights @ values).transpose(0, 1).to(q.dtype)
