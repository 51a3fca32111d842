"""Causal attention over latents (MLA), in both of its forms.

Absorbed: all heads read the same rows of a paged latent cache. A latent is the key without rotation, and the value.

    out[i, h] = softmax(mask(scale * (q[i, h, :rank] @ latent^T + q[i, h, rank:] @ rope_keys^T))) @ latent

Expanded: each head has its own keys and values, which the caller has computed from the latents of one sequence.

    out[i, h] = softmax(mask(scale * (q[i, h, :nope] @ k[h]^T + q[i, h, nope:] @ rope_keys^T))) @ v[h]

For each pair of query and key a head takes 2 * rank + rope_dim multiplications in the absorbed form, and nope +
rope_dim + value_dim in the expanded form. But the expanded form first needs k and v, which take rank * (nope +
value_dim) multiplications for each key and head. Causality, `seq_lens` and `cu_seqlens_q` are those of
paged_attention.py.

Shapes of the absorbed form: q [tokens, heads, rank + rope_dim], the stride over tokens is free; out [tokens, heads,
rank], contiguous; cache: see latent_cache.py. A result does not depend on other sequences, and has the same bits in a
decode and in a prefill; on a GPU (latent_tiles.py) only with `batch_invariant`.

Shapes of the expanded form: q [tokens, heads, nope + rope_dim], of the last `tokens` positions of the sequence; kv
[keys, heads, nope + value_dim] and rope_keys [keys, rope_dim], contiguous; out [tokens, heads, value_dim].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.latent_tiles import launch_latent_attention, pick_latent_tiles
from coatcheck.kernels.attention.paged_attention import check_tables
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, make_plan
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, check_heads, check_shape, refuse

# Limits of the C library: MAX_VALUE and MAX_ROPE of kernels/csrc/attention/item.h.
NATIVE_MAX_RANK, NATIVE_MAX_ROPE = 512, 64


def latent_attention(
    q: Tensor,
    cache: LatentCache,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    batch_invariant: bool = False,
    plan: AttentionPlan | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """The absorbed form. `batch_invariant`, `plan`: for the Triton kernels, as in paged_attention.py.

    `lse`: float32 [tokens, heads], gets the log-sum-exp of each row of scores, by which merge_shards.py combines
    results over parts of the keys. A query over no keys has the result 0 and the log-sum-exp -inf.
    """
    check_tables(block_tables, seq_lens, cu_seqlens_q, cache.device)
    check_dtype("q", q, *FLOATS)
    check_heads("q", q, (None, None, cache.rank + cache.rope_dim), q.dtype, cache.device)
    _check_scale(scale)
    tokens, heads, _ = q.shape
    out = torch.empty((tokens, heads, cache.rank), dtype=q.dtype, device=q.device)
    if lse is not None:
        check_dense("lse", lse, (tokens, heads), torch.float32, q.device)
    if uses_triton(q):
        if plan is None:
            q_lens = cu_seqlens_q.diff().tolist()
            tiles = pick_latent_tiles(
                heads, cache.rank, element_size=q.element_size(), pool_bits=cache.bits, gpu=gpu_properties(q.device),
                batch_invariant=batch_invariant,
            )  # fmt: skip
            plan = make_plan(q_lens, seq_lens.tolist(), tiles, 0, q.device)
        launch_latent_attention(q, cache, block_tables, plan, scale, out, lse)
        return out
    library = native.library_for(q)
    if library is None or not has_native_dims(cache.rank, cache.rope_dim, cache.rank):
        latent_attention_reference(q, cache, block_tables, seq_lens, cu_seqlens_q, scale, out, lse)
        return out
    arguments = native.ATTENTION.pack(
        q.data_ptr(), q.stride(0), cache.pointer, block_tables.data_ptr(), block_tables.stride(0),
        seq_lens.data_ptr(), cu_seqlens_q.data_ptr(), len(seq_lens), heads, scale, 0.0, 0,
        native.TYPES[q.dtype], 0, out.data_ptr(), cache.rank, 1, cache.rope_dim,
        cache.rope_keys.data_ptr(), cache.rope_keys.stride(0) * cache.rope_keys.itemsize, cache.rope_row_bytes,
        *((0, 0) if cache.rope_scales is None else (cache.rope_scales.data_ptr(), cache.rope_scales.stride(0))),
        0 if lse is None else lse.data_ptr(),
    )  # fmt: skip
    if library.attention[q.dtype](arguments):
        raise native.out_of_memory("latent_attention")
    return out


def expanded_attention(q: Tensor, kv: Tensor, rope_keys: Tensor, nope: int, scale: float) -> Tensor:
    """The expanded form, for one sequence. `nope`: the number of elements of a key without its rotary part."""
    check_dtype("q", q, *FLOATS)
    check_shape("kv", kv, (None, None, None))
    (keys, heads, width), rope_dim = kv.shape, rope_keys.shape[-1]
    check_heads("q", q, (None, heads, nope + rope_dim), q.dtype, kv.device)
    check_dense("kv", kv, (keys, heads, width), q.dtype, q.device)
    check_dense("rope_keys", rope_keys, (keys, rope_dim), q.dtype, q.device)
    _check_scale(scale)
    tokens, value_dim = len(q), width - nope
    if not 0 < tokens <= keys:
        refuse("q", f"1 to {keys} tokens, as there are keys", tokens)
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    library = native.library_for(q)
    if library is None or not has_native_dims(nope, rope_dim, value_dim):
        out.copy_(expanded_attention_reference(q, kv, rope_keys, nope, scale))
        return out
    # `kv` as a KV cache with one token in each block: for every head the elements of its key, then of its value.
    size = kv.itemsize
    row = width * size
    cache = native.KV_CACHE.pack(
        kv.data_ptr(), kv.data_ptr() + nope * size, heads * row, heads * row, 0, 0, 0, 0,
        heads, 1, nope, row, native.ELEMENTS[kv.dtype],
    )  # fmt: skip
    table = torch.arange(keys, dtype=torch.int32)
    lengths = torch.tensor([keys, 0, tokens], dtype=torch.int32)
    arguments = native.ATTENTION.pack(
        q.data_ptr(), q.stride(0), native.address_of(cache), table.data_ptr(), keys,
        lengths.data_ptr(), lengths.data_ptr() + 4, 1, heads, scale, 0.0, 0,
        native.TYPES[q.dtype], 0, out.data_ptr(), value_dim, 0, rope_dim,
        rope_keys.data_ptr(), rope_dim * size, rope_dim * size, 0, 0, 0,
    )  # fmt: skip
    if library.attention[q.dtype](arguments):
        raise native.out_of_memory("expanded_attention")
    return out


def has_native_dims(key_dim: int, rope_dim: int, value_dim: int) -> bool:
    """Whether the C library computes rows of these sizes. The references compute others."""
    is_whole = key_dim % 16 == 0 and rope_dim % 16 == 0 and value_dim % 16 == 0
    return is_whole and max(key_dim, value_dim) <= NATIVE_MAX_RANK and rope_dim <= NATIVE_MAX_ROPE


def _check_scale(scale: float) -> None:
    if not scale > 0.0:
        refuse("scale", "a positive number", scale)


def latent_attention_reference(
    q: Tensor,
    cache: LatentCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """The absorbed form in float32, one sequence at a time, written to `out` and `lse`. The results of queries without
    keys are 0."""
    starts = cu_seqlens_q.tolist()
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or seq_len == 0:
            continue
        blocks = block_tables[row, : -(-seq_len // cache.block_size)].long()
        latent, rope_keys = (rows[:seq_len] for rows in cache.rows(blocks))
        kv = torch.cat((latent, latent), dim=1)[:, None].expand(-1, q.shape[1], -1)
        out[first:last] = expanded_attention_reference(q[first:last], kv, rope_keys, cache.rank, scale).to(q.dtype)
        if lse is not None:
            lse[first:last] = _scores(q[first:last], kv, rope_keys, cache.rank, scale).logsumexp(-1).T


def expanded_attention_reference(q: Tensor, kv: Tensor, rope_keys: Tensor, nope: int, scale: float) -> Tensor:
    """The expanded form in float32. Both forms are tested against it."""
    weights = _scores(q, kv, rope_keys, nope, scale).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, kv[:, :, nope:].float())


def _scores(q: Tensor, kv: Tensor, rope_keys: Tensor, nope: int, scale: float) -> Tensor:
    """float32 [heads, tokens, keys]; -inf for keys after the query."""
    keys = kv[:, :, :nope].float()
    q_nope, q_rope = q.float().split_with_sizes((nope, rope_keys.shape[1]), dim=2)
    scores = torch.einsum("thd,shd->hts", q_nope, keys) + torch.einsum("thd,sd->hts", q_rope, rope_keys.float())
    position = torch.arange(len(kv) - len(q), len(kv), device=q.device)[:, None]
    hidden = torch.arange(len(kv), device=q.device)[None] > position
    return (scale * scores).masked_fill(hidden, -math.inf)
