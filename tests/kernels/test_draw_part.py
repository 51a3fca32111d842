"""Draws from parts of the vocabulary: the best token of all parts is the one that is drawn from the whole row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatcheck.kernels.sampling.draw_part import (
    draw_part,
    draw_part_reference,
    find_floors,
    find_floors_reference,
)
from coatcheck.kernels.sampling.sample import sample
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("draw_part")]


def knobs(rows: int) -> dict[str, Tensor]:
    """Greedy rows, drawn ones, and rows with top-k, min-p, both, and top-p after top-k."""
    at = torch.arange(rows)
    top_k = torch.tensor([0, 0, 20, 0, 3, 64], dtype=torch.int32)[at % 6]
    return dict(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3])[at % 4],
        top_k=top_k,
        top_p=torch.where(top_k > 0, torch.tensor([1.0, 0.8, 0.3, 0.95, 0.99])[at % 5], 1.0),
        min_p=torch.tensor([0.0, 0.05, 0.0, 0.01, 0.0])[at % 5],
        seed=at * 7919 - 5,
        choice=(at % 3).to(torch.int32),
        position=at + 100,
    )


def merged(logits: Tensor, parts: int, chosen: dict[str, Tensor]) -> Tensor:
    """The tokens of `parts` ranks, as the sampler merges them."""
    width = -(-logits.shape[1] // parts)
    shards = logits.split(width, dim=1)
    filters = [chosen[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    largest = torch.cat([shard.topk(min(64, shard.shape[1])).values for shard in shards], dim=1)
    floors = find_floors(largest, *filters)
    draw = {name: chosen[name] for name in ("temperature", "seed", "choice", "position")}
    drawn = [draw_part(shard, at * width, floors=floors, **draw) for at, shard in enumerate(shards)]
    best, tokens = (torch.stack(each) for each in zip(*drawn, strict=True))
    return tokens.gather(0, best.argmax(0)[None])[0]


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("vocab", [90, 1000, 32_003])
def test_the_best_part_has_the_token_of_the_whole_row(vocab: int, parts: int) -> None:
    """Bit for bit the token of `sample`: with ties within a part and between parts, with forbidden tokens, with rows
    whose kept tokens lie in one part."""
    torch.manual_seed(vocab + parts)
    logits = (torch.randn(120, vocab + 5) * 3)[:, :vocab]
    logits[20:50] = logits[20:50].round()  # ties
    logits[50:60, vocab // 3 :] = -torch.inf
    logits[60:70] = 1.5
    logits[70:80, -1] = 30.0
    chosen = knobs(120)
    assert torch.equal(merged(logits, parts, chosen), sample(logits, **chosen))


def test_min_p_may_keep_more_tokens_than_a_part_sends() -> None:
    """Of a flat row min-p keeps hundreds of each part's tokens, and all forms draw among them, not among 64."""
    torch.manual_seed(6)
    logits, chosen = torch.rand(60, 1000) * 4, knobs(60)
    chosen |= dict(temperature=torch.ones(60), top_k=torch.zeros(60, dtype=torch.int32), min_p=torch.full((60,), 0.2))
    chosen["top_p"] = torch.ones(60)
    drawn = sample(logits, **chosen)
    assert torch.equal(merged(logits, 2, chosen), drawn)
    filters = [chosen[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    largest = torch.cat([part.topk(64).values for part in logits.split(500, dim=1)], dim=1)
    assert torch.equal(find_floors_reference(largest, *filters), find_floors_reference(logits, *filters))


def test_sums_and_floors_are_those_of_the_reference() -> None:
    """Sums agree with torch's to rounding, kept sets and tokens exactly; a part without kept tokens has -inf."""
    torch.manual_seed(4)
    logits, chosen = torch.randn(30, 700) * 2, knobs(30)
    filters = [chosen[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    floors = find_floors(logits, *filters)
    scaled = logits / chosen["temperature"].clamp(min=1e-3)[:, None]
    kept, wanted = (scaled >= each[:, None] for each in (floors, find_floors_reference(logits, *filters)))
    assert torch.equal(kept, wanted) and not kept.all()
    floors[5] = 1e9
    draw = {name: chosen[name] for name in ("temperature", "seed", "choice", "position")}
    best, tokens = draw_part(logits, 5000, floors=floors, **draw)
    want, want_tokens = draw_part_reference(
        logits, 5000, chosen["temperature"], floors, chosen["seed"], chosen["choice"], chosen["position"]
    )
    torch.testing.assert_close(best, want, rtol=1e-5, atol=1e-5)
    has_token = best > -torch.inf
    assert torch.equal(tokens[has_token], want_tokens[has_token]) and best[5] == -torch.inf and tokens.min() >= 5000
