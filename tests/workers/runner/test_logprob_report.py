"""LogprobReport: rows that ask for many log-probabilities take memory for themselves alone."""

import math

import pytest
import torch
from torch import Tensor

from coatcheck.kernels.sampling.logprobs import logprobs
from coatcheck.proto.sampling import ALL_LOGPROBS, MAX_LOGPROBS
from coatcheck.workers.runner import device_step
from coatcheck.workers.runner.device_step import LogprobReport

VOCAB = 300


def test_each_row_has_what_it_asks_for() -> None:
    """Narrow, wide, named and all log-probabilities in one step equal torch's, in descending order."""
    torch.manual_seed(1)
    logits = torch.randn(12, VOCAB)
    tokens = torch.randint(VOCAB, (12,))
    counts = [0, 3, MAX_LOGPROBS, MAX_LOGPROBS + 1, VOCAB, *[ALL_LOGPROBS] * 5, 50, 20]
    named = {10: (7, 299, 0)}
    entries = LogprobReport.start(logits, tokens, counts, named).wait()
    wanted = logits.log_softmax(-1)
    for row, (entry, count) in enumerate(zip(entries, counts, strict=True)):
        assert entry.token_id == tokens[row] and math.isclose(entry.logprob, wanted[row, tokens[row]], abs_tol=1e-5)
        assert entry.rank == 1 + int((logits[row] > logits[row, tokens[row]]).sum())
        if count == ALL_LOGPROBS:
            found = torch.frombuffer(bytearray(entry.all_logprobs), dtype=torch.float32)
            assert torch.allclose(found, wanted[row], atol=1e-5) and not entry.top
            continue
        ids = list(named[row]) if row in named else wanted[row].argsort(descending=True)[:count].tolist()
        assert [token for token, _ in entry.top] == ids and not entry.all_logprobs
        assert all(math.isclose(value, wanted[row, token], abs_tol=1e-5) for token, value in entry.top)


def test_a_wide_row_does_not_widen_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call computes at most MAX_LOGPROBS for several rows, whatever one of them asks for."""
    calls: list[tuple[int, int]] = []

    def recorded(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        calls.append((len(logits), k))
        return logprobs(logits, token_ids, k)

    monkeypatch.setattr(device_step, "logprobs", recorded)
    tokens = torch.zeros(64, dtype=torch.int64)
    entries = LogprobReport.start(torch.randn(64, VOCAB), tokens, [VOCAB, *[2] * 63]).wait()
    assert calls == [(64, 2), (1, VOCAB)]
    assert [len(entry.top) for entry in entries] == [VOCAB, *[2] * 63]
