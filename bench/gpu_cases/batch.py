"""Batches of sequences over a paged pool of any kind, for bench/gpu_cases/attention.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, make_plan
from coatcheck.kernels.attention.tile_launch import Tiles, pick_tiles
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.store_kv import store_kv
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.runner.kv_memory import allocate_kv_pool, make_layer_caches

BLOCK = 16


def shuffled_tables(per_seq: Sequence[int], device: torch.device) -> Tensor:
    """Block tables, int32 [sequences, max(per_seq)], of sequences with `per_seq` blocks each, in random order."""
    blocks = torch.randperm(sum(per_seq), dtype=torch.int32).to(device)
    tables = torch.zeros(len(per_seq), max(per_seq), dtype=torch.int32, device=device)
    for row, own in enumerate(blocks.split(list(per_seq))):
        tables[row, : len(own)] = own
    return tables


class Batch:
    """Sequences of (q_len, seq_len) with random keys and values, in shuffled blocks of one layer's pool."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kv: KvDtype,
        device: torch.device, *, window: int = 0, softcap: float = 0.0,
    ) -> None:  # fmt: skip
        torch.manual_seed(len(lengths) + dim)
        per_seq = [-(-seq_len // BLOCK) for _, seq_len in lengths]
        layout = BlockLayout.of([LayerSpec(heads, kv_heads, dim, window, softcap)], BLOCK, kv)
        self.pool = allocate_kv_pool(layout, sum(per_seq), device)
        self.cache: KVCache = make_layer_caches(layout, self.pool)[0]
        self.kv_bytes = sum(seq_len for _, seq_len in lengths) * layout.bytes_per_token
        self.tables = shuffled_tables(per_seq, device)
        for row, (_, seq_len) in enumerate(lengths):
            at = torch.arange(seq_len, device=device)
            slots = self.tables[row, at // BLOCK].long() * BLOCK + at % BLOCK
            for part in slots.split(1 << 16):
                k, v = torch.randn(2, len(part), kv_heads, dim, device=device).to(dtype)
                store_kv(k, v, self.cache, part)
        self.lengths = list(lengths)
        self.seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
        self.starts = starts.to(device, torch.int32)
        self.q = torch.randn(int(starts[-1]), heads, dim, device=device).to(dtype)
        self.scale, self.window, self.softcap = dim**-0.5, window, softcap
        self._plans: dict[Tiles, AttentionPlan] = {}

    def run(self, *, batch_invariant: bool = False, tiles: Tiles | None = None) -> Tensor:
        """`tiles`: other launch parameters than the picked ones."""
        return paged_attention(
            self.q, self.cache, block_tables=self.tables, seq_lens=self.seq_lens, cu_seqlens_q=self.starts,
            scale=self.scale, sliding_window=self.window, softcap=self.softcap, batch_invariant=batch_invariant,
            plan=self.plan(tiles or self.tiles(batch_invariant=batch_invariant)) if uses_triton(self.q) else None,
        )  # fmt: skip

    def tiles(self, *, batch_invariant: bool = False) -> Tiles:
        """The picked launch parameters."""
        return pick_tiles(
            self.q.shape[1], self.cache.kv_heads, self.cache.head_dim, element_size=self.q.element_size(),
            pool_bits=self.cache.bits, gpu=gpu_properties(self.q.device), batch_invariant=batch_invariant,
        )  # fmt: skip

    def plan(self, tiles: Tiles) -> AttentionPlan:
        """The plan, which is made once, because the layers of a step share it."""
        if tiles not in self._plans:
            q_lens, seq_lens = zip(*self.lengths, strict=True)
            self._plans[tiles] = make_plan(q_lens, seq_lens, tiles, self.window, self.q.device)
        return self._plans[tiles]

    def error(self, have: Tensor, rows: Sequence[int] | None = None) -> float:
        """The largest difference of `have` from the float32 reference, over the largest value, of the sequences `rows`
        (None: all). Both read the same quantised pool."""
        worst = 0.0
        for row in range(len(self.lengths)) if rows is None else rows:
            first, last = int(self.starts[row]), int(self.starts[row + 1])
            q = self.q[first:last].float()
            want = torch.empty_like(q)
            starts = torch.tensor([0, last - first], dtype=torch.int32)
            paged_attention_reference(
                q, self.cache, self.tables[row : row + 1], self.seq_lens[row : row + 1], starts, self.scale,
                self.window, self.softcap, None, want,
            )  # fmt: skip
            difference = (have[first:last].float() - want).abs().max() / want.abs().max().clamp(min=1e-9)
            worst = max(worst, float(difference))
        return worst

    def gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Dense inputs for torch's attention: our queries [batch, heads, q_len, dim], random keys and values [batch,
        kv_heads, seq_len, dim]. All sequences must have the same lengths."""
        (q_len, seq_len), count = self.lengths[0], len(self.lengths)
        shape = (self.cache.kv_heads, seq_len, self.q.shape[2])
        k, v = torch.randn(2, count, *shape, device=self.q.device, dtype=torch.float32).to(self.q.dtype)
        return self.q.unflatten(0, (count, q_len)).transpose(1, 2).contiguous(), k, v
