"""Filters, penalties, masks, the draw and logprobs; run by kernel_checks.py and tests/gpu."""

import torch

from coatcheck.kernels.sampling.filter_floor import filter_floor
from coatcheck.kernels.sampling.logprobs import launch_logprobs, logprobs_reference
from coatcheck.kernels.sampling.penalties import apply_penalties, apply_penalties_reference
from coatcheck.kernels.sampling.sample import filter_reference, launch_draw, noise_bits_reference, sample_reference
from coatcheck.kernels.sampling.token_mask import apply_token_mask, apply_token_mask_reference
from tests.kernels.triton.agreement import agree


def sampling() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 3000) * 2
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5])
    top_k, top_p = torch.tensor([0, 0, 20, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.9, 0.8])
    min_p, choice = torch.zeros(4), torch.tensor([0, 1, -1, 2**31 - 1], dtype=torch.int32)
    seed, position = torch.tensor([0, -1, 2**63 - 1, 12345]), torch.tensor([0, 2**40, 5, 131071])
    floors = filter_floor(logits, temperature, top_k, top_p, min_p)
    out, bits = torch.empty(4, dtype=torch.int64), torch.empty(4, 3000, dtype=torch.int64)
    launch_draw(logits, temperature, floors, seed, choice, position, out, bits)
    assert torch.equal(bits, noise_bits_reference(seed, choice, position, torch.arange(3000)))
    assert torch.equal(out, sample_reference(logits, temperature, top_k, top_p, min_p, seed, choice, position))
    best, parts = torch.empty(2, 4), torch.empty(2, 4, dtype=torch.int64)
    for at in range(2):
        launch_draw(
            logits[:, 1500 * at :][:, :1500], temperature, floors, seed, choice, position, parts[at],
            best_out=best[at], first_token=1500 * at,
        )  # fmt: skip
    assert torch.equal(parts.gather(0, best.argmax(0)[None])[0], out)
    for vocab in (2999, 33, 1024):
        have, rows = torch.randn(4, 3000)[:, :vocab], torch.tensor([3, 0])
        mask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32)
        want = apply_token_mask_reference(have.clone(), rows, mask)
        apply_token_mask(have, rows, mask)
        assert torch.equal(have, want) and want.isinf().any()


def probabilities() -> None:
    """Log-probabilities and ranks of rows of any length, forbidden tokens and ties among them."""
    torch.manual_seed(5)
    for vocab in (1, 33, 5000):
        logits = (torch.randn(4, vocab + 2) * 4)[:, :vocab]
        logits[1] = logits[1].round()
        logits[2, vocab // 2 + 1 :] = -torch.inf
        tokens = torch.tensor([0, vocab - 1, 0, vocab // 2])
        _, chosen, rank = launch_logprobs(logits, tokens)
        want = logprobs_reference(logits, tokens, 0)
        agree(chosen, want[0])
        assert torch.equal(rank, want[1])


def filters() -> None:
    """Floors keep exactly the reference's set: ties, forbidden tokens, strides, and every filter alone and together.

    The last row has fewer tokens that are not forbidden than top-k, as under a grammar.

    With 40,000 tokens the row of two values has more ties than there are places for candidates, and the flat ones have
    more tokens above top_p than candidates: both need the whole row again.
    """
    torch.manual_seed(2)
    for vocab in (1, 5, 5000, 40_000):
        logits = (torch.randn(13, vocab + 3) * 3)[:, :vocab]
        logits[:6] = logits[:6].round()  # ties
        logits[4] = (logits[4] > 2).float()
        logits[[0, 8]] *= 0.01
        if vocab > 1:
            logits[3, vocab // 2 :] = -torch.inf
            logits[12, 2:] = -torch.inf
        temperature = torch.tensor([1.0, 0.5, 2.0, 1.0] * 3 + [1.0])
        top_k = torch.tensor([0, 7, 0, 1, 50, 3, 0, 2, 5000, 0, 0, 1, 3], dtype=torch.int32)
        top_p = torch.tensor([0.9, 1.0, 0.3, 0.95, 0.7, 1.0, 1.0, 0.5, 0.9, 0.01, 1.0, 1.0, 1.0])
        min_p = torch.tensor([0.0, 0.01, 0.1, 0.0, 0.0, 0.3, 0.05, 0.0, 0.02, 0.0, 0.0, 1.0, 0.0])
        floors = filter_floor(logits, temperature, top_k, top_p, min_p)
        scaled = logits / temperature[:, None]
        want = filter_reference(scaled, top_k, top_p, min_p) > float("-inf")
        have = (scaled >= floors[:, None]) & (scaled > float("-inf"))
        assert torch.equal(have, want), (vocab, (have != want).sum(dim=1))
        # The floors of rows with a small top-k are those of the largest logits of each part, bit for bit.
        parts = logits.split(-(-vocab // 3), dim=1)
        largest = torch.cat([part.topk(min(64, part.shape[1])).values for part in parts], dim=1)
        few = (top_k > 0) & (top_k <= 64)
        assert torch.equal(filter_floor(largest, temperature, top_k, top_p, min_p)[few], floors[few])


def penalties() -> None:
    torch.manual_seed(3)
    logits, tokens = torch.randn(6, 43)[:, :40], torch.randint(0, 40, (7, 9200), dtype=torch.int32)
    slots = torch.tensor([6, 0, 3, 2, 5, 1])
    total = torch.tensor([9200, 5, 0, 1, 1100, 9200], dtype=torch.int32)
    prompt = torch.tensor([4, 5, 0, 0, 1050, 3], dtype=torch.int32)
    for row in range(6):
        tokens[slots[row], total[row] :] = 10**6  # padding may hold anything
    values = (
        torch.tensor([1.3, 2.0, 1.5, 0.7, 1.0, 1.0]), torch.tensor([0.5, 0.1, 1, -1, 0.2, 0.0]),
        torch.tensor([0.3, 0.0, 0.5, 0.1, 0.9, 0.0]),
    )  # fmt: skip
    want = apply_penalties_reference(logits.clone(), tokens, slots, prompt, total, *values)
    apply_penalties(logits, tokens, slots, prompt, total, *values)
    agree(logits, want)
    # More equal tokens than 16 bits count, in a prompt and in an output.
    logits, tokens = torch.randn(2, 40), torch.full((2, 66_000), 7, dtype=torch.int32)
    slots, prompt, total = torch.tensor([0, 1]), torch.tensor([65_999, 1]), torch.tensor([66_000, 66_000])
    lens = prompt.int(), total.int()
    few = torch.tensor([1.3, 1.3]), torch.tensor([0.5, 0.5]), torch.tensor([0.01, 0.01])
    want = apply_penalties_reference(logits.clone(), tokens, slots, *lens, *few)
    apply_penalties(logits, tokens, slots, *lens, *few)
    agree(logits, want)
