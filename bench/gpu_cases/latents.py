"""Absorbed latent attention (MLA) for bench/gpu.py, with the sizes of DeepSeek-V3: error, and time over the roof.

The roof is that of reading the latents, or that of the products: 128 heads multiply each latent so often that the two
are close on an H100.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coatcheck.bench.gpu_cases.batch import shuffled_tables
from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement, or_failure
from coatcheck.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from coatcheck.kernels.attention.latent_tiles import pick_latent_tiles
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, make_plan
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.latent_cache import LatentCache, store_latent_reference
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.runner.kv_memory import allocate_kv_pool, make_latent_caches

_BLOCK = 64
_CHECKED_HEADS = 4  # the reference needs a float32 copy of the keys for each head
_TOLERANCE = 0.03


def latents(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Decodes with all heads and with those of a rank at tp 8, few tokens behind a prefix, and a prompt."""
    whole, eighth = 128, 16
    shapes = [
        ("decode, 64 of 4k", [(1, 4096)] * 64, whole), ("decode, 64 of 4k", [(1, 4096)] * 64, eighth),
        ("decode, 1 of 32k", [(1, 32768)], whole), ("decode, 1 of 32k", [(1, 32768)], eighth),
        ("prefill, 1 of 2k", [(2048, 2048)], whole), ("prefill, 1 of 2k", [(2048, 2048)], eighth),
    ]  # fmt: skip
    rank, rope = 512, 64
    if quick:
        shapes, rank, rope = [("3 of 100 and 9 of 40", [(1, 100)] * 3 + [(9, 40)], 16)], 64, 16
    for what, lengths, heads in shapes:
        for kv in (KvDtype.BFLOAT16, KvDtype.FP8):
            title = f"{what}, {heads} heads, {kv}"
            yield from or_failure("latents", title, _measure(title, lengths, (heads, rank, rope), kv, device, roofs))


def _measure(
    title: str, lengths: Sequence[tuple[int, int]], sizes: tuple[int, int, int], kv: KvDtype, device: torch.device,
    roofs: Roofs,
) -> Iterator[Measurement]:  # fmt: skip
    """`sizes`: heads, rank, rotary elements."""
    heads, rank, rope = sizes
    batch = _LatentBatch(lengths, heads, rank, rope, kv, device)
    error = batch.error(batch.run(), [0, len(lengths) - 1])
    took = seconds(batch.run, device, times=3)
    pairs = sum(q * seq_len - q * (q - 1) / 2 for q, seq_len in lengths)
    floor = roofs.floor(batch.kv_bytes, 2 * pairs * heads * (2 * rank + rope))
    yield Measurement(
        "latents", f"{title}, {batch.kv_bytes / 1e9:.2f} GB", took * 1e3, floor / took, error,
        target=f"error <= {_TOLERANCE:g}", met=error <= _TOLERANCE,
    )  # fmt: skip


class _LatentBatch:
    """Sequences of (q_len, seq_len) with random latents and rotary keys, in shuffled blocks of one layer's pool."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], heads: int, rank: int, rope: int, kv: KvDtype, device: torch.device
    ) -> None:
        torch.manual_seed(len(lengths) + heads)
        per_seq = [-(-seq_len // _BLOCK) for _, seq_len in lengths]
        layout = BlockLayout.of([LayerSpec(heads, 1, rank + rope, v_head_dim=0, rope_head_dim=rope)], _BLOCK, kv)
        pool = allocate_kv_pool(layout, sum(per_seq), device)
        self.cache: LatentCache = make_latent_caches(layout, pool)[0]
        self.kv_bytes = sum(seq_len for _, seq_len in lengths) * layout.bytes_per_token
        self.tables = shuffled_tables(per_seq, device)
        for row, (_, seq_len) in enumerate(lengths):
            at = torch.arange(seq_len, device=device)
            slots = self.tables[row, at // _BLOCK].long() * _BLOCK + at % _BLOCK
            latent, rope_keys = (torch.randn(seq_len, dim, device=device).bfloat16() for dim in (rank, rope))
            store_latent_reference(latent, rope_keys, self.cache, slots)
        self.lengths = list(lengths)
        self.seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
        self.starts = starts.to(device, torch.int32)
        self.q = torch.randn(int(starts[-1]), heads, rank + rope, device=device).bfloat16()
        self.scale = (rank + rope) ** -0.5
        self._plan = self._make_plan() if uses_triton(self.q) else None

    def run(self) -> Tensor:
        return latent_attention(
            self.q, self.cache, block_tables=self.tables, seq_lens=self.seq_lens, cu_seqlens_q=self.starts,
            scale=self.scale, plan=self._plan,
        )  # fmt: skip

    def _make_plan(self) -> AttentionPlan:
        """Made once, because the layers of a step share it."""
        tiles = pick_latent_tiles(
            self.q.shape[1], self.cache.rank, element_size=self.q.element_size(), pool_bits=self.cache.bits,
            gpu=gpu_properties(self.q.device),
        )  # fmt: skip
        q_lens, seq_lens = zip(*self.lengths, strict=True)
        return make_plan(q_lens, seq_lens, tiles, 0, self.q.device)

    def error(self, have: Tensor, rows: Sequence[int]) -> float:
        """The largest difference of `have` from the float32 reference, over the largest value, of the sequences `rows`
        and the first and last heads. Both read the same quantised pool."""
        worst, heads = 0.0, have.shape[1]
        checked = torch.tensor([*range(_CHECKED_HEADS // 2), *range(heads - _CHECKED_HEADS // 2, heads)])
        for row in rows:
            first, last = int(self.starts[row]), int(self.starts[row + 1])
            q = self.q[first:last, checked.to(have.device)].float()
            want = torch.empty(*q.shape[:2], self.cache.rank, device=q.device)
            starts = torch.tensor([0, last - first], dtype=torch.int32)
            latent_attention_reference(
                q, self.cache, self.tables[row : row + 1], self.seq_lens[row : row + 1], starts, self.scale, want
            )
            difference = have[first:last, checked.to(have.device)].float() - want
            worst = max(worst, float(difference.abs().max() / want.abs().max()))
        return worst
