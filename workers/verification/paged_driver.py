"""PagedDriver: runs a Model over its own KV pool, with chunked prefills, decodes and shared prefixes in one batch.

The caller decides what each step computes. There is no scheduler, no sampler and no eviction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.kv_memory import add_states, allocate_kv_pool, make_caches, make_states

_MAX_SEQUENCES: Final = 64  # sequences of one driver of a model with states; each has its own slot


@dataclass(slots=True)
class PagedSequence:
    """One sequence. `slot`: the slot of its states, if the model keeps states. `computed`: how many of its tokens are
    in the pool. `output`: the tokens that `greedy` added."""

    tokens: list[int]
    blocks: list[int]
    slot: int = 0
    computed: int = 0
    output: list[int] = field(default_factory=list)


class PagedDriver:
    """A pool of `num_blocks` blocks on the CPU, which sequences get in random order. Block 0 is never used."""

    def __init__(self, model: Model, *, block_size: int = 8, num_blocks: int = 128, kv_dtype: str = "auto") -> None:
        self.model = model
        self.layout = BlockLayout.of(model.spec.layers, block_size, choose_kv_dtype(kv_dtype, model.spec.dtype))
        # All bits set is NaN in every float type, so a read of anything but a sequence's own tokens shows in the
        # result.
        pool = allocate_kv_pool(self.layout, num_blocks, torch.device("cpu"))
        pool.fill_(255)
        states = make_states(model.spec, _MAX_SEQUENCES, torch.device("cpu"))
        for tensor in (tensor for state in states for tensor in state.tensors):
            tensor.fill_(torch.nan)  # for the same reason
        self.layer_caches = add_states(make_caches(self.layout, pool), states)
        self._num_sequences = 0
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
        self._free: list[int] = order.tolist()

    def add_sequence(
        self, tokens: Sequence[int], max_tokens: int, *, prefix_of: PagedSequence | None = None
    ) -> PagedSequence:
        """A new sequence, with the blocks for its tokens and `max_tokens` more.

        `prefix_of`: a sequence whose computed full blocks the new one shares as far as the tokens are equal, as with
        the prefix cache. The block of the new sequence's last token is not shared.
        """
        size = self.layout.block_size
        shared = 0
        if prefix_of is not None and not self.model.spec.state_layers:
            most = min(prefix_of.computed, len(tokens) - 1) // size
            while shared < most and prefix_of.tokens[: (shared + 1) * size] == list(tokens[: (shared + 1) * size]):
                shared += 1
        count = -(-(len(tokens) + max_tokens) // size) - shared
        blocks, self._free = self._free[:count], self._free[count:]
        assert len(blocks) == count, "num_blocks is too small for these sequences"
        assert self._num_sequences < _MAX_SEQUENCES or not self.model.spec.state_layers, "no slot is left"
        inherited = prefix_of.blocks[:shared] if prefix_of is not None else []
        self._num_sequences += 1
        return PagedSequence(list(tokens), [*inherited, *blocks], self._num_sequences - 1, computed=shared * size)

    def step(self, work: list[tuple[PagedSequence, int]], *, sample_chunks: bool = True) -> Tensor:
        """One forward pass over the next n tokens of each (sequence, n) of `work`. Returns logits [R, vocab_size].

        There is a row for each sequence, of the last of its n tokens. Without `sample_chunks` a sequence with tokens
        left to compute has no row.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots, lens, starts = [], [], [0]
        size = self.layout.block_size
        for sequence, n in work:
            span = range(sequence.computed, sequence.computed + n)
            ids += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.blocks[i // size] * size + i % size for i in span]
            sequence.computed = span.stop
            lens.append(span.stop)
            starts.append(starts[-1] + n)
        tables = torch.zeros(len(work), max(len(sequence.blocks) for sequence, _ in work), dtype=torch.int32)
        for row, (sequence, _) in enumerate(work):
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_tables=tables,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
            state_slots=torch.tensor([sequence.slot for sequence, _ in work]),
            max_seq_len=max(lens),
        )
        whole = [sample_chunks or sequence.computed == len(sequence.tokens) for sequence, _ in work]
        wanted = LogitsIndices(
            torch.tensor([end - 1 for end, last in zip(starts[1:], whole, strict=True) if last], dtype=torch.int64),
            torch.tensor([0, *accumulate(whole)], dtype=torch.int32),
        )
        return self.model.logits(
            self.model.forward(torch.tensor(ids), torch.tensor(positions), metadata, self.layer_caches, wanted)
        )

    def hidden(self, sequence: PagedSequence, n: int) -> Tensor:
        """Compute the next `n` tokens of one sequence. Returns their hidden states [n, hidden_size]."""
        size, span = self.layout.block_size, range(sequence.computed, sequence.computed + n)
        sequence.computed = span.stop
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor([sequence.blocks[i // size] * size + i % size for i in span]),
            block_tables=torch.tensor([sequence.blocks], dtype=torch.int32),
            seq_lens=torch.tensor([span.stop], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
            state_slots=torch.tensor([sequence.slot]),
            max_seq_len=span.stop,
        )
        ids = torch.tensor(sequence.tokens[span.start : span.stop])
        return self.model.forward(ids, torch.tensor(list(span)), metadata, self.layer_caches)

    def greedy(self, prompts: list[list[int]], max_tokens: int, *, chunk: int, stagger: int = 2) -> list[list[int]]:
        """The first `max_tokens` greedy tokens of each prompt. Prompt i joins at step i * stagger, so that its prefill
        shares steps with decodes of the others. `chunk`: prompt tokens of a step."""
        waiting = [self.add_sequence(prompt, max_tokens) for prompt in prompts]
        everyone, running, step = list(waiting), list[PagedSequence](), 0
        while waiting or running:
            while waiting and step >= (len(everyone) - len(waiting)) * stagger:
                running.append(waiting.pop(0))
            if running:
                work = [(s, min(chunk, len(s.tokens) - s.computed)) for s in running]
                logits = self.step(work, sample_chunks=False)
                whole = [s for s in running if s.computed == len(s.tokens)]
                for sequence, row in zip(whole, logits, strict=True):
                    sequence.output.append(int(row.argmax()))
                    sequence.tokens.append(sequence.output[-1])
                running = [s for s in running if len(s.output) < max_tokens]
            step += 1
        return [s.output for s in everyone]
