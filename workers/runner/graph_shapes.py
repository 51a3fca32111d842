"""The shapes of steps that are captured as CUDA graphs, and the choice of one for a step. Pure.

A graph has a fixed number of tokens, and launches the attention kernel once for each form of tiles: short tiles for
sequences with few queries (decodes), wide tiles for the others (chunks of prompts). So there are three kinds of shapes:
decodes alone, chunks alone, and both. A step takes the smallest shape of its kind that has room for its tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.core.step_plan import ScheduledSequence

# A decode reads all weights and each sequence's keys: time grows slowly with padding, so the sizes double at first.
_DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# From about 256 tokens on a step's time is that of its products, so the sizes are close together there: in a shape with
# 256 tokens or more at most a fourth is padding. Beyond 2048 tokens the products of a model with a billion parameters
# or more take longer than its launches, for which the host of an H100 took 1.1 ms a layer.
_CHUNK_SIZES = (
    8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048
)  # fmt: skip

_MODERATE = 512  # tokens of a graph that every model may have
_MAX_TABLES_BYTES = 64 << 20


class GraphSizes(NamedTuple):
    """Ascending numbers of tokens. `decodes`: of steps of decodes alone, which are also the numbers of rows that are
    sampled. `chunks`: of steps with chunks of prompts."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    def shapes(self, short_queries: tuple[int, int]) -> list[StepShape]:
        """The shapes to capture. `short_queries`: as in `pick_shape`. If decodes and chunks have the same tiles, a
        shape is its number of tokens."""
        sizes = sorted({*self.decodes, *self.chunks})
        if not short_queries[1] or (sizes and short_queries[0] >= sizes[-1]):
            return [StepShape(size, short_queries[1] > 0, not short_queries[1]) for size in sizes]
        return [
            *(StepShape(size, True, False) for size in self.decodes),
            *(StepShape(size, short, True) for short in (False, True) for size in self.chunks),
        ]


def capture_sizes(max_num_seqs: int, max_batch_tokens: int, largest: int) -> GraphSizes:
    """The sizes to capture, `largest` tokens at most; 0 for none. Each size takes time at startup, and memory."""
    return GraphSizes(
        _up_to(min(max_num_seqs, max_batch_tokens, largest), _DECODE_SIZES),
        _up_to(min(max_batch_tokens, largest), _CHUNK_SIZES),
    )


def limit_graphs(wanted: int, *, max_blocks: int, divides_tokens: bool) -> int:
    """The tokens of the largest graph, if `wanted` are configured.

    `max_blocks`: of a sequence. A graph gathers `max_blocks` block numbers for each of its tokens. Beyond 512 tokens
    they may take 64 MiB at most.
    `divides_tokens`: whether the ranks divide each block's tokens. In steps of more than 512 tokens they may then
    gather the contexts, for which no graph is captured.
    """
    fitting = max(_MODERATE, _MAX_TABLES_BYTES // (4 * max_blocks))
    return min(wanted, _MODERATE if divides_tokens else fitting)


def _up_to(largest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    largest = min(largest, sizes[-1])
    return (*(size for size in sizes if size < largest), largest) if largest > 0 else ()


def pick_shape(
    rows: Sequence[ScheduledSequence], shapes: Sequence[StepShape], short_queries: tuple[int, int]
) -> StepShape | None:
    """The smallest of `shapes` that can compute `rows`; None if there is none.

    `short_queries`: (fewest, most) queries of a row up to which the kinds of layers take short tiles.
    """
    if not rows:
        return None
    lengths = [row.num_tokens for row in rows]
    all_short, all_wide = max(lengths) <= short_queries[0], min(lengths) > short_queries[1]
    fitting = (
        shape
        for shape in shapes
        if shape.num_tokens >= sum(lengths) and (shape.has_short, shape.has_wide) == (not all_wide, not all_short)
    )
    return min(fitting, default=None)
