"""Sequences in a paged pool, and their attention by a kernel and by the float32 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coatcheck.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from coatcheck.kernels.attention.merge_shards import merge_parts_of_ranks, pack_parts
from coatcheck.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache, store_latent_reference
from coatcheck.kernels.kv.store_kv import store_kv_reference
from tests.kernels.caches import latent_cache, strided_cache


class Batch:
    """Sequences of (q_len, seq_len) with random keys and values in shuffled blocks of a strided pool.

    `kv`: the pool's dtype; None: that of the queries.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        size: int = 16,
        kv: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(sum(q * 7 + s for q, s in lengths) + heads + dim)
        per_seq = [-(-s // size) for _, s in lengths]
        blocks = sum(per_seq) + 3
        self.cache = strided_cache(blocks, kv_heads, size, dim, kv or dtype)
        order = torch.randperm(blocks)
        self.block_tables = torch.zeros(len(lengths), max(per_seq, default=0) + 2, dtype=torch.int32)
        used = 0
        for row, ((_, seq_len), count) in enumerate(zip(lengths, per_seq, strict=True)):
            ids = order[used : used + count]
            used += count
            self.block_tables[row, :count] = ids
            at = torch.arange(seq_len)
            k, v = (torch.randn(seq_len, kv_heads, dim).to(dtype) for _ in range(2))
            store_kv_reference(k, v, self.cache, ids[at // size] * size + at % size)
        self.seq_lens = torch.tensor([s for _, s in lengths], dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, *torch.tensor([q for q, _ in lengths]).cumsum(0)], dtype=torch.int32)
        tokens = int(self.cu_seqlens_q[-1])
        self.q = torch.randn(tokens, (heads + 2) * dim).to(dtype)[:, : heads * dim].unflatten(1, (heads, dim))
        self.scale = dim**-0.5

    def tables(self) -> dict[str, Any]:
        return dict(block_tables=self.block_tables, seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)

    def arguments(self) -> tuple[Tensor, KVCache, Tensor, Tensor, Tensor]:
        """The first arguments of a kernel's launch: queries, cache, block tables, lengths and starts."""
        return self.q, self.cache, self.block_tables, self.seq_lens, self.cu_seqlens_q

    def run(self, **options: Any) -> Tensor:
        options = {"scale": self.scale, **options}
        return paged_attention(self.q, self.cache, **self.tables(), **options)

    def reference(self, sliding_window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        out = torch.zeros(self.q.shape)
        paged_attention_reference(
            self.q, self.cache, **self.tables(), scale=self.scale, sliding_window=sliding_window, softcap=softcap,
            sinks=sinks, out=out,
        )  # fmt: skip
        return out


def close(have: Tensor, want: Tensor) -> None:
    """Assert equality within a few units of the dtype: weights and the result are rounded to it."""
    tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[have.dtype]
    torch.testing.assert_close(have.float(), want, rtol=tolerance, atol=tolerance)


class LatentBatch:
    """`lengths`: (queries, context) of each sequence."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int,
        rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        size: int = 16,
        kv: torch.dtype | None = None,
    ) -> None:
        random = torch.Generator(torch.get_default_device()).manual_seed(sum(map(sum, lengths)) + heads + rank)
        counts = [-(-context // size) for _, context in lengths]
        order = (torch.randperm(sum(counts), generator=random) + 1).to(torch.int32)  # block 0 stays unused
        self.block_tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.cache = latent_cache(sum(counts) + 1, size, rank, rope_dim, kv or dtype)
        for row, (blocks, (_, context)) in enumerate(zip(order.split(counts), lengths, strict=True)):
            self.block_tables[row, : len(blocks)] = blocks
            at = torch.arange(context)
            store_latent_reference(
                torch.randn(context, rank, generator=random).to(dtype),
                3 * torch.randn(context, rope_dim, generator=random).to(dtype),
                self.cache,
                blocks.long()[at // size] * size + at % size,
            )
        queries = [q for q, _ in lengths]
        self.seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        self.q = torch.randn(sum(queries), heads, rank + rope_dim, generator=random).to(dtype)
        self.scale = (rank + rope_dim) ** -0.5

    def run(self, q: Tensor | None = None) -> Tensor:
        return latent_attention(
            self.q if q is None else q,
            self.cache,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            scale=self.scale,
        )

    def reference(self) -> Tensor:
        """In float32."""
        out = torch.zeros(*self.q.shape[:2], self.cache.rank)
        tables = (self.block_tables, self.seq_lens, self.cu_seqlens_q)
        latent_attention_reference(self.q.float(), self.cache, *tables, self.scale, out)
        return out

    def one(self, row: int, query: int) -> Tensor:
        """The result of one query of a sequence as a decode of it alone."""
        context = int(self.seq_lens[row]) - int(self.cu_seqlens_q[row + 1] - self.cu_seqlens_q[row]) + query + 1
        at = int(self.cu_seqlens_q[row]) + query
        return latent_attention(
            self.q[at : at + 1],
            self.cache,
            block_tables=self.block_tables[row : row + 1],
            seq_lens=torch.tensor([context], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            scale=self.scale,
        )[0]

    def run_shards(self, shards: int, attend: Callable[..., Tensor] = latent_attention) -> Tensor:
        """The same results by `shards` simulated ranks, each with every `shards`-th token of the sequences.

        `attend`: takes q, cache, tables, lengths, scale and lse as latent_attention does.
        """
        tokens, heads, _ = self.q.shape
        lens = self.cu_seqlens_q.diff().long()
        row = torch.arange(len(lens)).repeat_interleave(lens)
        ends = self.seq_lens[row] - (self.cu_seqlens_q[1:][row] - torch.arange(1, tokens + 1))
        parts = []
        for rank in range(shards):
            lse = torch.empty(tokens, heads)
            out = attend(
                self.q,
                self._part_of_cache(rank, shards),
                block_tables=self.block_tables[row],
                seq_lens=((ends + shards - 1 - rank) // shards).to(torch.int32),
                cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32),
                scale=self.scale,
                lse=lse,
            )
            parts.append(pack_parts(out, lse, shards))
        return torch.cat([merge_parts_of_ranks(torch.stack(mine)) for mine in zip(*parts, strict=True)], dim=1)

    def _part_of_cache(self, rank: int, shards: int) -> LatentCache:
        whole = self.cache
        blocks, size = len(whole.latent), whole.block_size // shards
        part = latent_cache(blocks, size, whole.rank, whole.rope_dim, whole.dtype)
        for name in ("latent", "rope_keys", "latent_scales", "rope_scales"):
            if (rows := getattr(whole, name)) is not None:
                # As bytes or halves, because not every device copies float8 by strides.
                getattr(part, name).copy_(rows[:, :, rank::shards])
        return part
