"""Finds a layer's sliding window from transformers' mask function, without building a mask of the context's size.

transformers describes every mask by a function of (batch, head, query position, key position), which returns whether
the query attends to the key. `MaskRecorder` is a mask implementation that records these functions.
`find_sliding_window` evaluates one of them at a few thousand pairs of positions, up to the longest context.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]

# The masked value of mask number n is _MASKED * (1 + n), still distinct after a cast to bfloat16.
_MASKED: Final = -1e30
_SAMPLES: Final = 4096


class UnsupportedMask(Exception):
    """A mask is neither causal nor a sliding window; the message says how it differs."""


class MaskRecorder:
    """Makes the masks that a model requests, and finds the mask function of a mask that is passed to attention.

    A model may slice or cast its masks, or use several. Every mask has another masked value, by which it is recognised.
    """

    def __init__(self) -> None:
        self._masks: list[tuple[Tensor, MaskFunction]] = []

    def make_mask(
        self, *, q_length: int, kv_length: int, mask_function: MaskFunction, batch_size: int = 1, **unused: Any
    ) -> Tensor:
        """A causal float32 mask [batch_size, 1, q_length, kv_length], whatever `mask_function` is."""
        value = _MASKED * (1 + len(self._masks))
        mask = torch.full((q_length, kv_length), value).triu(1 + kv_length - q_length)
        mask = mask.expand(batch_size, 1, -1, -1)
        self._masks.append((mask, mask_function))
        return mask

    def mask_function_of(self, mask: Tensor) -> MaskFunction:
        """The mask function of a mask from `make_mask`. Raises UnsupportedMask for any other mask."""
        if mask.is_floating_point():
            number = round(mask.min().item() / _MASKED) - 1
            if 0 <= number < len(self._masks):
                made, function = self._masks[number]
                if mask.shape[-2:] == made.shape[-2:] and torch.equal(mask.float(), made.expand(mask.shape)):
                    return function
        raise UnsupportedMask("its attention adds a bias or its own mask to the scores")


def find_sliding_window(function: MaskFunction, limit: int, heads: int) -> int:
    """The sliding window of a mask function at positions below `limit`; 0 for full causal attention.

    With a window w a token attends to itself and the w - 1 tokens before it. A bisection over the keys of the last
    query finds w. Then every sampled pair must agree with w; the pairs cover all `heads` heads. Raises UnsupportedMask
    for any other pattern.
    """
    last = limit - 1
    if not _evaluate(function, [last], [last]).all():
        raise UnsupportedMask("its mask hides a token from itself")
    near, far = 0, limit  # distances back from the last query: the key at `near` is visible, the key at `far` is not
    while far - near > 1:
        middle = (near + far) // 2
        if _evaluate(function, [last], [last - middle])[0]:
            near = middle
        else:
            far = middle
    window = 0 if far == limit else far
    queries, keys = _sample_pairs(limit, window)
    expected = (keys <= queries) & ((keys > queries - window) if window else True)
    head = torch.arange(len(queries)) % heads
    seen = _evaluate(function, queries, keys, head)
    if torch.equal(seen, expected):
        return window
    wrong = int((seen != expected).nonzero()[0])
    query, key = int(queries[wrong]), int(keys[wrong])
    if key > query:
        raise UnsupportedMask(f"its attention is not causal (position {query} attends to position {key})")
    raise UnsupportedMask(
        f"its attention mask is neither causal nor a sliding window (position {query} "
        f"{'attends' if seen[wrong] else 'does not attend'} to position {key}); chunked attention and other masks are "
        "not supported"
    )


def _sample_pairs(limit: int, window: int) -> tuple[Tensor, Tensor]:
    """(query positions, key positions), int64 [N] each: random pairs at all magnitudes, and pairs at the edges of the
    window."""
    random = torch.Generator().manual_seed(limit)

    def spread(count: int) -> Tensor:  # log-uniform in 0 to limit - 1
        return (limit ** torch.rand(count, generator=random, dtype=torch.float64)).long() - 1

    queries = torch.cat([spread(_SAMPLES), torch.arange(min(limit, 64)), limit - 1 - spread(_SAMPLES // 4)])
    edges = [queries - d for d in (0, 1, -1, window - 1, window, window + 1)]
    distances = torch.cat([queries - spread(len(queries)), queries + spread(len(queries)), *edges])
    repeated = queries.repeat(len(edges) + 2)
    uniform = (torch.rand(len(repeated), generator=random, dtype=torch.float64) * (repeated + 1)).long()
    queries, keys = torch.cat([repeated, repeated]), torch.cat([distances, uniform])
    inside = (keys >= 0) & (keys < limit)
    return queries[inside], keys[inside]


def _evaluate(function: MaskFunction, queries: Any, keys: Any, heads: Tensor | None = None) -> Tensor:
    """bool [N]: whether each query attends to its key. Raises UnsupportedMask if the function reads more than the
    positions."""
    q, k = torch.as_tensor(queries), torch.as_tensor(keys)
    batch = torch.zeros_like(q)
    head = batch if heads is None else heads
    try:
        try:
            answer = function(batch, head, q, k)
        except (RuntimeError, TypeError):  # a function written for scalars
            answer = torch.vmap(function)(batch, head, q, k)
    except (IndexError, RuntimeError, TypeError) as error:
        raise UnsupportedMask(
            f"its attention mask depends on more than positions ({str(error).splitlines()[0]})"
        ) from None
    return torch.as_tensor(answer, dtype=torch.bool).expand(q.shape)
