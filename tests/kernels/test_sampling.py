"""Sampling, penalties, logit biases and log-probabilities: filtered sets, distributions, equal bits in C and torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.sampling import greedy
from coatcheck.kernels.sampling.greedy import argmax, widen_logits
from coatcheck.kernels.sampling.logprobs import logprobs, logprobs_reference
from coatcheck.kernels.sampling.penalties import add_logit_bias, apply_penalties, apply_penalties_reference
from coatcheck.kernels.sampling.sample import filter_reference, noise_bits_reference, sample, sample_reference
from coatcheck.kernels.sampling.token_mask import apply_token_mask, apply_token_mask_reference
from tests.examples import examples
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("sample")]


def knobs(rows: int, **given: Any) -> dict[str, Tensor]:
    """Every argument of `sample`, off unless given as a number (for all rows) or a list."""
    kinds = dict(
        temperature=(1.0, torch.float32), top_k=(0, torch.int32), top_p=(1.0, torch.float32),
        min_p=(0.0, torch.float32), seed=(0, torch.int64), choice=(0, torch.int32), position=(0, torch.int64),
    )  # fmt: skip
    out = {}
    for name, (default, dtype) in kinds.items():
        value = given.get(name, default)
        out[name] = torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)
    return out


def test_the_hash_gives_the_same_bits_in_torch_and_c() -> None:
    """Seeds, choices and positions at both ends of their ranges hash alike in both forms, and all differ."""
    library = native.library()
    assert library is not None, "the library is built where tests run"
    seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    choice = torch.tensor([0, 1, -1, 2**31 - 1, 7, 0], dtype=torch.int32)
    position = torch.tensor([0, 1, 2**40, 5, 131071, 0])
    tokens = torch.tensor([0, 1, 2, 1000, 262143, 2**31 - 1])
    out = torch.empty(6, 6, dtype=torch.int64)
    library.noise_bits(seed.data_ptr(), choice.data_ptr(), position.data_ptr(), 6, tokens.data_ptr(), 6, out.data_ptr())
    assert torch.equal(out, noise_bits_reference(seed, choice, position, tokens))
    assert out.unique().numel() == 36 and out.min() >= 0 and out.max() < 2**32


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    """Temperature 0 is argmax, the smallest id among equals, with any filters."""
    logits = torch.tensor([[0.0, 3.0, 3.0, -math.inf], [-math.inf, -5.0, -6.0, -5.0]])
    assert sample(logits, **knobs(2, temperature=0.0, top_k=1, top_p=0.1)).tolist() == [1, 1]


@pytest.mark.parametrize("most_in_one_thread", [1 << 22, 100])
def test_logits_are_widened_and_compared_as_in_torch(monkeypatch: pytest.MonkeyPatch, most_in_one_thread: int) -> None:
    """Any dtype and stride, infinities and NaN: the same bits, and the first of the largest, where NaN is largest."""
    monkeypatch.setattr(greedy, "MOST_IN_ONE_THREAD", most_in_one_thread)
    torch.manual_seed(6)
    logits = torch.randn(5, 1003)
    logits[1, [7, 500]] = math.inf
    logits[2] = -math.inf
    logits[3, [90, 900]] = math.nan
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (logits.to(dtype), logits.to(dtype).T.contiguous().T, logits.to(dtype)[::2, 3:]):
            wide = widen_logits(rows)
            assert wide.dtype == torch.float32 and torch.equal(wide.nan_to_num(1e9), rows.float().nan_to_num(1e9))
            assert torch.equal(argmax(wide), wide.argmax(dim=-1))


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
)
def test_draws_follow_the_distribution(filters: dict[str, float]) -> None:
    """Over 40,000 positions the counts fit the filtered softmax (chi-square, fixed seed)."""
    torch.manual_seed(5)
    rows, vocab = 40_000, 60
    logits = torch.randn(vocab)
    arguments = knobs(1, temperature=0.9, **filters)
    kept = filter_reference(logits[None] / 0.9, arguments["top_k"], arguments["top_p"], arguments["min_p"])[0]
    arguments = {name: value.expand(rows).contiguous() for name, value in arguments.items()}
    arguments["position"] = torch.arange(rows)
    drawn = sample(logits.expand(rows, vocab).contiguous(), **arguments)
    expected = rows * kept.softmax(0)
    counts = torch.bincount(drawn, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum().item()
    freedom = int(inside.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """Tokens of probability 1e-4 are drawn evenly over the whole range of token ids."""
    rows, vocab = 2_000, 10_000
    arguments = knobs(rows)
    arguments["seed"] = torch.arange(rows)
    drawn = sample(torch.zeros(1, vocab).expand(rows, vocab), **arguments)
    assert abs(drawn.float().mean().item() - vocab / 2) < 4 * vocab / math.sqrt(12 * rows)
    assert drawn.unique().numel() > 0.88 * rows  # birthday: 1 - exp(-0.2) / 2 and so on: about 1,813 of 2,000


def test_a_draw_depends_on_its_key_and_nothing_else() -> None:
    """The same (seed, choice, position) draws the same token in any batch and row. Another key draws another token."""
    torch.manual_seed(6)
    logits = torch.randn(1, 5000)
    keys = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0)]
    seed, choice, position = (list(part) for part in zip(*keys, strict=True))
    flat = torch.zeros(1, 5000)
    together = sample(flat.expand(5, -1), **knobs(5, seed=seed, choice=choice, position=position)).tolist()
    assert together[0] == together[4] and len(set(together)) == 4
    crowd = sample(
        torch.cat((logits, flat, logits * 3)), **knobs(3, seed=[9, 1, 9], top_k=[5, 0, 0], temperature=[0.0, 1.0, 0.5])
    )
    assert crowd[1] == together[0]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_draws_stay_inside_the_filters_and_equal_the_reference(data: st.DataObject) -> None:
    """For any logits (ties and -inf included) and filters, the native draw is the reference's and lies in its set."""
    vocab = data.draw(st.integers(1, 70))
    rows = data.draw(st.integers(1, 4))
    levels = torch.tensor([-math.inf, -3.0, -0.5, 0.0, 0.0, 0.25, 1.0, 2.0])
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    ties = levels[torch.randint(len(levels), (rows, vocab))]
    logits = torch.where(torch.rand(rows, vocab) < data.draw(st.floats(0, 1)), ties, torch.randn(rows, vocab) * 6)
    logits[:, data.draw(st.integers(0, vocab - 1))] = 0.5  # never everything forbidden
    each = dict(
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]), top_k=st.integers(0, vocab + 2),
        top_p=st.sampled_from([0.05, 0.33, 0.71, 0.95, 1.0]), min_p=st.sampled_from([0.0, 0.01, 0.21, 1.0]),
        seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 9), position=st.integers(0, 2**40),
    )  # fmt: skip
    arguments = knobs(rows, **{n: data.draw(st.lists(s, min_size=rows, max_size=rows)) for n, s in each.items()})
    have = sample(logits, **arguments)
    want = sample_reference(logits, **arguments)
    temp = torch.where(arguments["temperature"] > 0, arguments["temperature"], 1.0)[:, None]
    kept = filter_reference(logits / temp, arguments["top_k"], arguments["top_p"], arguments["min_p"])
    for row in range(rows):
        if arguments["temperature"][row] > 0:
            assert kept[row, have[row]] > -math.inf
    assert torch.equal(have, want)


def test_the_mass_of_the_kept_is_that_of_k_tokens() -> None:
    """Of five values equal to the second largest one counts: then the largest has 0.73 of the mass, else 0.35. Without
    top-k all count."""
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]).expand(60, 6)
    each = dict(position=list(range(60)), top_p=0.7)
    for top_k, drawn in ((2, {1}), (0, set(range(6)))):
        arguments = knobs(60, top_k=top_k, **each)
        assert set(sample(logits, **arguments).tolist()) == drawn
        assert torch.equal(sample(logits, **arguments), sample_reference(logits, **arguments))


def test_large_vocabularies_agree_with_the_reference() -> None:
    """Filters without a sort keep the same sets as the reference's sort, over 50,000 tokens and strided rows."""
    torch.manual_seed(7)
    logits = torch.randn(6, 50_010)[:, :50_001] * 3
    arguments = knobs(6, top_k=[0, 50, 0, 1000, 1, 0], top_p=[1, 1, 0.9, 0.5, 1, 0.01], min_p=[0, 0, 0, 0, 0, 0.1],
                      seed=[1, 2, 3, 4, 5, 6], temperature=[1.0, 0.7, 1.3, 2.0, 1.0, 5.0])  # fmt: skip
    assert torch.equal(sample(logits, **arguments), sample_reference(logits, **arguments))
    assert sample(logits[:0], **knobs(0)).shape == (0,)


def test_penalties_agree_with_the_reference_and_touch_nothing_else() -> None:
    """Repetition over prompt and output, the others over the output; padding may hold anything."""
    torch.manual_seed(8)
    logits, tokens = torch.randn(5, 40), torch.randint(0, 40, (7, 12), dtype=torch.int32)
    slots = torch.tensor([6, 0, 3, 2, 5])
    total = torch.tensor([12, 5, 0, 1, 9], dtype=torch.int32)
    prompt = torch.tensor([4, 5, 0, 0, 2], dtype=torch.int32)
    for row in range(5):
        tokens[slots[row], total[row] :] = 10**6
    values = [torch.tensor([1.3, 2.0, 1.5, 0.7, 1.0]), torch.tensor([0.5, 0.1, 1, -1, 0.2]), torch.rand(5)]
    want = apply_penalties_reference(logits.clone(), tokens, slots, prompt, total, *values)
    have = logits.clone()
    assert apply_penalties(have, tokens, slots, prompt, total, *values) is have
    torch.testing.assert_close(have, want)
    assert torch.equal(have[2], logits[2])


def test_repetition_penalty_is_transformers_own() -> None:
    """Over prompt and output together the result is that of transformers' processor."""
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, tokens = torch.randn(2, 30), torch.randint(0, 30, (2, 9), dtype=torch.int32)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(tokens.long(), logits.clone())
    lens, off = torch.full((2,), 9, dtype=torch.int32), torch.zeros(2)
    slots = torch.arange(2)
    ours = apply_penalties(logits, tokens, slots, lens - 4, lens, torch.full((2,), 1.7), off, off)
    torch.testing.assert_close(ours, theirs)


def test_logit_bias_adds_and_forbids() -> None:
    """The biases of a repeated (row, token) pair add up, and -inf forbids a token."""
    logits = torch.zeros(2, 4)
    add_logit_bias(
        logits, torch.tensor([0, 0, 1]), torch.tensor([1, 1, 3]), torch.tensor([0.5, 0.25, -math.inf])
    )  # fmt: skip
    assert logits.tolist() == [[0, 0.75, 0, 0], [0, 0, 0, -math.inf]]


def test_logprobs_of_the_whole_vocabulary_are_in_order() -> None:
    """More tokens than the C kernel sorts: all of them in descending order, equal ones by ascending id."""
    logits = (torch.arange(6000) // 3).float()[None] * 1e-2
    chosen, rank, ids, values = logprobs(logits, torch.tensor([7]), 6000)
    order = sorted(range(6000), key=lambda token: (-(token // 3), token))
    assert ids[0].tolist() == order and rank.tolist() == [6000 - 6]
    expected = logits.log_softmax(-1)[0]
    torch.testing.assert_close(values[0], expected[torch.tensor(order)])
    torch.testing.assert_close(chosen[0], expected[7])


@pytest.mark.parametrize("k", [0, 1, 5, 37])
def test_logprobs_agree_with_the_reference(k: int) -> None:
    """Chosen, rank and the top k are those of a stable sort, ties and forbidden tokens included."""
    torch.manual_seed(9)
    logits = torch.randn(7, 37).mul(4).round().div(2)
    logits[0, 5:] = -math.inf
    tokens = torch.randint(0, 5, (7,))
    for have, want in zip(logprobs(logits, tokens, k), logprobs_reference(logits, tokens, k), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    assert logprobs(logits[:0], tokens[:0], k)[2].shape == (0, k)


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_logprobs_of_a_row_with_nan_are_of_distinct_tokens(k: int, sign: int) -> None:
    """Broken weights give NaN. Each place gets another token of the vocabulary, not what was in memory."""
    logits = torch.randn(3, 9)
    logits[0, 2:7] = logits[1, 0] = logits[2] = math.copysign(math.nan, sign)
    ids = logprobs(logits, torch.zeros(3, dtype=torch.int64), k)[2]
    assert ids.min() >= 0 and ids.max() < 9
    assert [len(set(row)) for row in ids.tolist()] == [k, k, k]


def test_wrong_arguments_are_refused_by_name() -> None:
    """The sampler, log-probabilities and biases name the argument that they refuse."""
    logits, good = torch.zeros(2, 8), knobs(2)
    for name, wrong in (("top_k", torch.zeros(2)), ("seed", torch.zeros(3, dtype=torch.int64))):
        with pytest.raises(LaunchRefused, match=f"^{name}: expected "):
            sample(logits, **{**good, name: wrong})
    with pytest.raises(LaunchRefused, match="^logits: expected "):
        sample(logits.bfloat16(), **good)
    with pytest.raises(LaunchRefused, match="^k: expected "):
        logprobs(logits, torch.zeros(2, dtype=torch.int64), 9)
    with pytest.raises(LaunchRefused, match="^bias: expected "):
        add_logit_bias(logits, torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 5001])
def test_a_mask_forbids_all_other_tokens(vocab: int) -> None:
    """Tokens of the mask keep their logits, and others become -inf. Other rows and memory past a row do not change."""
    logits = torch.randn(5, vocab + 7)[:, :vocab]
    whole = torch.as_strided(logits, (5, vocab + 7), (vocab + 7, 1))
    before = whole.clone()
    rows = torch.tensor([4, 1])
    allowed = torch.rand(2, vocab) < 0.4
    padded = torch.zeros(2, -(-vocab // 32) * 32, dtype=torch.int64)
    padded[:, :vocab] = allowed.long()
    words = (padded.view(2, -1, 32) << torch.arange(32)).sum(-1)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    want = before.clone()
    want[rows, :vocab] = want[rows, :vocab].masked_fill(~allowed, -math.inf)
    reference = apply_token_mask_reference(before[:, :vocab].clone(), rows, mask)
    assert torch.equal(reference, want[:, :vocab])
    assert apply_token_mask(logits, rows, mask) is logits and torch.equal(whole, want)
    with pytest.raises(LaunchRefused, match="mask"):
        apply_token_mask(logits, rows, mask[:, :0])
    with pytest.raises(LaunchRefused, match="^logits: expected "):
        apply_token_mask(logits[0], rows, mask)
