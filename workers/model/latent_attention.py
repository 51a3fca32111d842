"""LatentAttention: multi-head latent attention (MLA) of DeepSeek-V2, V3 and similar models, over a pool of latents.

What differs between model types is in LatentDescription (workers/attention/latent_description.py).

    c, k_rope = kv_a(x)
    q[h] = q_b[h](norm(q_a(x)))        or q_proj[h](x)
    k[h], v[h] = W_UK[h] norm(c), W_UV[h] norm(c)

The pool stores norm(c) and the rotated k_rope: kv_lora_rank + qk_rope_head_dim elements per token for all heads.

There are two forms. *Absorbed*: W_UK is multiplied into the query and W_UV into the output, so all heads attend to the
latents. *Expanded*: the keys and values of a sequence's context are computed from its latents, some heads at a time.
Decodes take the absorbed form. On CPUs a prefill takes the form with fewer operations (`prefers_expanded`). With
`batch_invariant` it takes the absorbed form, because a token's bits must not depend on the length of its chunk. On GPUs
every token takes the absorbed form, because to choose the host would have to wait for the lengths.

With --mla-shard tokens a rank stores every tp-th token (workers/attention/token_shards.py). There are two ways to
attend to all tokens. In the first, each rank gets the queries of all heads, attends to its own tokens, and sends the
partial results to the ranks of the heads, which merge them. In the second, each rank gathers the latents of the context
and computes its own heads. The expanded form takes the second way, and so do steps with prompts on GPUs where it moves
fewer bytes.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from coatcheck.kernels.attention.latent_attention import expanded_attention, latent_attention
from coatcheck.kernels.attention.merge_shards import merge_parts_of_ranks, pack_parts
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.layers.heads_linear import HeadsLinear
from coatcheck.kernels.layers.latent_rotary import rotate_and_store_latent
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.workers.attention.attention import AttentionLayer, kernel_plan, kind_of
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, GatheredContext, LogitsIndices
from coatcheck.workers.attention.latent_description import LatentDescription
from coatcheck.workers.attention.token_shards import local_queries
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.multi_head_attention import RotaryTables

# The most bytes of keys and values that the expanded form computes at a time. At least one head is computed at a time.
EXPANDED_BYTES: Final = 64 << 20


class LatentDims(NamedTuple):
    """Numbers of elements. `rank`: of a latent. `nope`, `rope`: of the part of a head's key without rotation, and of
    the rotated part. `value`: of a head's value."""

    rank: int
    nope: int
    rope: int
    value: int


def prefers_expanded(dims: LatentDims, q_len: int, seq_len: int) -> bool:
    """Whether the expanded form takes fewer multiplications for the last `q_len` of `seq_len` tokens.

    Multiplications per head. Absorbed: rank * (nope + value) for each query, and 2 * rank + rope for each pair of query
    and key. Expanded: rank * (nope + value) for each key, and nope + rope + value for each pair.
    """
    projection = dims.rank * (dims.nope + dims.value)
    pairs = q_len * (2 * seq_len - q_len + 1) // 2
    absorbed = q_len * projection + pairs * (2 * dims.rank + dims.rope)
    return seq_len * projection + pairs * (dims.nope + dims.rope + dims.value) < absorbed


class LatentAttention:
    """From the normalised hidden states [T, hidden] to every head's output, [T, heads * v_head_dim]."""

    def __init__(
        self,
        attention: Any,
        spec: AttentionLayer,
        communicator: Communicator,
        *,
        batch_invariant: bool,
    ) -> None:
        """`attention`: transformers' module. `spec`: with this rank's heads.

        If the model's RoPE rotates neighbouring elements, the rows of the weights are reordered, so that the elements
        of a pair lie half of `rope` apart. The scores are the same. Factors after norms are multiplied into the norms'
        weights.
        """
        description = LatentDescription.of(attention)
        assert description is not None, "the probe found latents"
        self.spec = spec
        self._communicator = communicator
        heads, rope = spec.num_heads, spec.rope_head_dim
        rank = spec.head_dim - rope
        up = attention.kv_b_proj.weight.detach().view(heads, -1, rank)
        has_q_a = description.has_query_latent
        q_out = attention.q_b_proj if has_q_a else attention.q_proj
        nope = q_out.weight.shape[0] // heads - rope
        self.dims = LatentDims(rank, nope, rope, up.shape[1] - nope)
        order = torch.arange(rope, device=up.device)
        if description.is_interleaved:
            order = torch.cat((order[::2], order[1::2]))
        q_weight = q_out.weight.detach().view(heads, nope + rope, -1)
        q_weight = torch.cat((q_weight[:, :nope], q_weight[:, nope:][:, order]), dim=1).flatten(0, 1)
        kv_a = attention.kv_a_proj_with_mqa
        kv_rows = torch.cat((torch.arange(rank, device=up.device), rank + order))
        first = attention.q_a_proj.weight.detach() if has_q_a else q_weight
        bias = None
        if kv_a.bias is not None:
            q_bias = attention.q_a_proj.bias if has_q_a else q_weight.new_zeros(len(q_weight))
            bias = torch.cat((q_bias.detach(), kv_a.bias.detach()[kv_rows]))
        self.input = PackedLinear(
            torch.cat((first, kv_a.weight.detach()[kv_rows])), bias, batch_invariant=batch_invariant
        )
        self.input_sizes = (len(first), rank + rope)
        self.q_norm = _norm(attention.q_a_layernorm, description.query_scale) if has_q_a else None
        self.q_up = PackedLinear(q_weight, batch_invariant=batch_invariant) if has_q_a else None
        self.kv_norm = _norm(attention.kv_a_layernorm, description.latent_scale)
        self.k_up_absorbed = HeadsLinear(up[:, :nope].transpose(1, 2), batch_invariant=batch_invariant)
        # Only for the expanded form. On a GPU the lengths by which to choose a form are not on the host.
        self.k_up = None if batch_invariant or uses_triton(up) else HeadsLinear(up[:, :nope])
        self.v_up = HeadsLinear(up[:, nope:], batch_invariant=batch_invariant)

    def linears(self) -> list[PackedLinear]:
        return [self.input] if self.q_up is None else [self.input, self.q_up]

    def __call__(
        self,
        x: Tensor,
        rotary: RotaryTables,
        metadata: AttentionMetadata,
        cache: LatentCache,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """x [T, hidden] -> [T, heads * value], or only the rows of `logits_indices`, if given."""
        _, nope, rope, value = self.dims
        q, kv = self.input(x).split_with_sizes(self.input_sizes, dim=1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.unflatten(1, (self.spec.num_heads, nope + rope))
        q_rope = q[:, :, nope:]
        rotate_and_store_latent(
            q_rope, kv, self.kv_norm, rotary.cos, rotary.sin, cache, metadata.slot_mapping, out=q_rope
        )
        if logits_indices is not None:
            q, metadata = q[logits_indices.tokens], logits_indices.select_queries(metadata)
        if self.k_up is None or logits_indices is not None:
            return self._absorbed(q, metadata.cu_seqlens_q, metadata, cache).flatten(1)
        starts, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        lens = [stop - start for start, stop in pairwise(starts)]
        rows = enumerate(zip(lens, seq_lens, strict=True))
        expanded = [row for row, (n, length) in rows if n > 1 and prefers_expanded(self.dims, n, length)]
        if not expanded:
            return self._absorbed(q, metadata.cu_seqlens_q, metadata, cache).flatten(1)
        out: Tensor = q.new_empty((len(q), self.spec.num_heads, value))
        for row in expanded:
            own = slice(starts[row], starts[row + 1])
            self._expanded(q[own], metadata.block_tables[row], seq_lens[row], cache, out[own])
            lens[row] = 0
        if any(lens):
            counts = torch.tensor(lens, device=q.device)
            is_left = torch.ones(len(q), dtype=torch.bool, device=q.device)
            for row in expanded:
                is_left[starts[row] : starts[row + 1]] = False
            cu_seqlens = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
            out[is_left] = self._absorbed(q[is_left], cu_seqlens, metadata, cache)
        return out.flatten(1)

    def _absorbed(self, q: Tensor, cu_seqlens_q: Tensor, metadata: AttentionMetadata, cache: LatentCache) -> Tensor:
        """q [R, heads, nope + rope] -> [R, heads, value]."""
        rank, nope, rope, _ = self.dims
        absorbed = q.new_empty((*q.shape[:2], rank + rope))
        self.k_up_absorbed(q[:, :, :nope], absorbed[:, :, :rank])
        absorbed[:, :, rank:] = q[:, :, nope:]
        if metadata.gathered is not None:
            return self.v_up(self._attend_gathered(absorbed, metadata.gathered, metadata, cache))
        if self.spec.token_shards > 1:
            return self.v_up(self._attend_all_ranks(absorbed, cu_seqlens_q, metadata, cache))
        latents = latent_attention(
            absorbed,
            cache,
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            scale=self.spec.scale,
            batch_invariant=metadata.batch_invariant,
            plan=kernel_plan(metadata, self.spec),
        )
        return self.v_up(latents)

    def _attend_all_ranks(
        self, q: Tensor, cu_seqlens_q: Tensor, metadata: AttentionMetadata, cache: LatentCache
    ) -> Tensor:
        """Attend with this rank's heads to the tokens of all ranks: q [R, heads, rank + rope] -> [R, heads, rank]."""
        local = metadata.local
        if local is None or cu_seqlens_q is not metadata.cu_seqlens_q:
            local = local_queries(replace(metadata, cu_seqlens_q=cu_seqlens_q), self.spec, len(q))
        all_heads = self._communicator.all_gather(q, dim=1)
        lse = torch.empty(all_heads.shape[:2], dtype=torch.float32, device=q.device)
        out = latent_attention(
            all_heads,
            cache,
            block_tables=local.block_tables,
            seq_lens=local.seq_lens,
            cu_seqlens_q=local.cu_seqlens_q,
            scale=self.spec.scale,
            batch_invariant=metadata.batch_invariant,
            plan=kernel_plan(metadata, self.spec),
            lse=lse,
        )
        return merge_parts_of_ranks(self._communicator.all_to_all(pack_parts(out, lse, self.spec.token_shards)))

    def _attend_gathered(
        self, q: Tensor, gathered: GatheredContext, metadata: AttentionMetadata, cache: LatentCache
    ) -> Tensor:
        """As `_attend_all_ranks`, for all queries of a step, with the latents of all ranks gathered first."""
        latents, rope_keys = self._gather_rows(gathered.blocks, cache, q.dtype)
        shape = (-1, 1, cache.block_size * self.spec.token_shards)
        context = LatentCache(latents.view(*shape, cache.rank), rope_keys.view(*shape, cache.rope_dim))
        return latent_attention(
            q,
            context,
            block_tables=gathered.block_tables,
            seq_lens=metadata.seq_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            scale=self.spec.scale,
            plan=gathered.plans.get(kind_of(self.spec)),
        )

    def _gather_rows(self, blocks: Tensor, cache: LatentCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(latents [T, rank], rotary keys [T, rope]) of the T tokens of `blocks`, in order. With n token shards rank r
        stores the tokens r, r + n, r + 2n, ..."""
        if self.spec.token_shards == 1:
            return cache.rows(blocks, dtype)
        latents, rope_keys = (
            self._communicator.all_gather(rows[:, None], dim=1).flatten(0, 1) for rows in cache.rows(blocks, dtype)
        )
        return latents, rope_keys

    def _expanded(self, q: Tensor, blocks: Tensor, seq_len: int, cache: LatentCache, out: Tensor) -> None:
        """Attend with the queries of the last R tokens of one sequence: q [R, heads, nope + rope] -> out [R, heads,
        value]."""
        _, nope, _, value = self.dims
        heads = self.spec.num_heads
        block_size = cache.block_size * self.spec.token_shards
        latents, rope_keys = self._gather_rows(blocks[: -(-seq_len // block_size)].long(), cache, q.dtype)
        latents, rope_keys = latents[:seq_len, None], rope_keys[:seq_len].contiguous()
        step = max(1, EXPANDED_BYTES // (seq_len * (nope + value) * q.itemsize))
        for first in range(0, heads, step):
            part = slice(first, min(first + step, heads))
            shared = latents.expand(-1, part.stop - first, -1)
            kv = q.new_empty((seq_len, part.stop - first, nope + value))
            assert self.k_up is not None, "with batch_invariant no sequence is expanded"
            self.k_up(shared, kv[:, :, :nope], part)
            self.v_up(shared, kv[:, :, nope:], part)
            out[:, part] = expanded_attention(q[:, part], kv, rope_keys, nope, self.spec.scale)


def _norm(module: Any, scale: float) -> RmsNorm:
    return RmsNorm(module.weight.detach() * scale, module.variance_epsilon)


def latent_projections(causal: nn.Module, layers: list[AttentionLayer]) -> set[nn.Module]:
    """The linears of latent attention except o_proj. LatentAttention splits and reorders their weights."""
    modules = [causal.get_submodule(layer.module) for layer in layers if layer.is_latent]
    children = [pair for module in modules for pair in module.named_children()]
    return {child for name, child in children if isinstance(child, nn.Linear) and name != "o_proj"}
