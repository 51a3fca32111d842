"""MaskPattern: finds a layer's sliding window from transformers' mask function.

A mask function says for any (batch, head, query position, key position) whether the query sees the key. `window_of`
evaluates it at positions up to the longest context, so a window of 128k tokens is found without a mask of that size.
`MaskRecorder` is a mask implementation for transformers. Each of its masks has a masked value of its own, so that it is
recognised after a model has sliced or cast it.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]

_MASKED: Final = -1e30  # times (1 + the mask's number); still distinct after a cast to bfloat16
_SAMPLES: Final = 4096


class UnknownPattern(Exception):
    """A mask is neither causal nor a sliding window; the message says how it differs."""


class MaskRecorder:
    """Makes a mask for every request of a model, and keeps the mask function of each."""

    def __init__(self) -> None:
        self._handed: list[tuple[Tensor, MaskFunction]] = []

    def make(
        self, *, q_length: int, kv_length: int, mask_function: MaskFunction, batch_size: int = 1, **unused: Any
    ) -> Tensor:
        """A causal float32 mask [batch_size, 1, q_length, kv_length]; its masked value identifies it."""
        value = _MASKED * (1 + len(self._handed))
        mask = torch.full((q_length, kv_length), value).triu(1 + kv_length - q_length)
        mask = mask.expand(batch_size, 1, -1, -1)
        self._handed.append((mask, mask_function))
        return mask

    def function_of(self, mask: Tensor) -> MaskFunction:
        """The function that stands for a mask which reached attention; raises UnknownPattern for any other mask."""
        if mask.is_floating_point():
            number = round(mask.min().item() / _MASKED) - 1
            if 0 <= number < len(self._handed):
                handed, function = self._handed[number]
                if mask.shape[-2:] == handed.shape[-2:] and torch.equal(mask.float(), handed.expand(mask.shape)):
                    return function
        raise UnknownPattern("its attention adds a bias or a mask of its own to the scores")


def window_of(function: MaskFunction, limit: int, heads: int) -> int:
    """The sliding window of a mask function over positions below `limit`: 0 for full causal attention.

    A token sees itself and the window - 1 tokens before it. Raises UnknownPattern for any other pattern.
    """
    last = limit - 1
    if not _evaluate(function, [last], [last]).all():
        raise UnknownPattern("its mask hides a token from itself")
    near, far = 0, limit  # the distance back to a key that is seen, and to one that is not
    while far - near > 1:
        middle = (near + far) // 2
        if _evaluate(function, [last], [last - middle])[0]:
            near = middle
        else:
            far = middle
    window = 0 if far == limit else far
    queries, keys = _pairs(limit, window)
    expected = (keys <= queries) & ((keys > queries - window) if window else True)
    head = torch.arange(len(queries)) % heads
    seen = _evaluate(function, queries, keys, head)
    if torch.equal(seen, expected):
        return window
    wrong = int((seen != expected).nonzero()[0])
    query, key = int(queries[wrong]), int(keys[wrong])
    if key > query:
        raise UnknownPattern(f"its attention is not causal (position {query} sees position {key})")
    raise UnknownPattern(
        f"its mask is neither causal nor a sliding window (position {query} "
        f"{'sees' if seen[wrong] else 'does not see'} position {key}); chunked and other masks are not supported"
    )


def _pairs(limit: int, window: int) -> tuple[Tensor, Tensor]:
    """Pairs of query and key positions [N]: random at all magnitudes, and on both sides of the pattern's edges."""
    random = torch.Generator().manual_seed(limit)

    def spread(count: int) -> Tensor:  # log-uniform
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
    """bool [N]: whether each query sees its key."""
    q, k = torch.as_tensor(queries), torch.as_tensor(keys)
    batch = torch.zeros_like(q)
    head = batch if heads is None else heads
    try:
        try:
            answer = function(batch, head, q, k)
        except (RuntimeError, TypeError):  # a function written for scalars
            answer = torch.vmap(function)(batch, head, q, k)
    except (IndexError, RuntimeError, TypeError) as error:
        raise UnknownPattern(f"its mask depends on more than positions ({str(error).splitlines()[0]})") from None
    return torch.as_tensor(answer, dtype=torch.bool).expand(q.shape)
