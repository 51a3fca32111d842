"""Gated delta nets for bench/gpu.py, with the sizes of Qwen3-Next: error, and bytes over the memory bandwidth.

The bytes are those of the inputs, the outputs, and the states, which are read and written.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement, or_failure
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.linear_attention.gated_delta_net import GatedDeltaNet

_BF16 = torch.bfloat16
_BEFORE = 100  # tokens of a decoding sequence before the step
_LONGEST_CHECKED, _MOST_CHECKED = 130, 3  # tokens and sequences: the reference computes one token at a time
_TOLERANCE = 0.03


def delta(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Decodes and prompts, and prompts in a fixed order, token by token. The error is that of few short sequences."""
    one, many, decoding = (100, 40, 5) if quick else (8192, 2048, 64)
    cases = [
        (f"decode of {decoding}", [1] * decoding, False), ("decode of 1", [1], False),
        (f"prefill, 1 of {one}", [one], False), (f"prefill, 4 of {many}", [many] * 4, False),
        (f"prefill, 1 of {one}, batch-invariant", [one], True),
    ]  # fmt: skip
    for what, counts, batch_invariant in cases:
        rows = _measure(what, counts, device, roofs, quick=quick, batch_invariant=batch_invariant)
        yield from or_failure("delta", what, rows)


def _measure(
    what: str, counts: Sequence[int], device: torch.device, roofs: Roofs, *, quick: bool, batch_invariant: bool
) -> Iterator[Measurement]:
    few = [min(count, _LONGEST_CHECKED) for count in counts[:_MOST_CHECKED]]
    error = _Step(few, device, quick=quick, batch_invariant=batch_invariant).error()
    step = _Step(counts, device, quick=quick, batch_invariant=batch_invariant)
    took = seconds(step.run, device, times=3)
    yield Measurement(
        "delta", f"{what}, {step.moved / 1e6:.0f} MB", took * 1e3, roofs.floor(step.moved) / took, error,
        target=f"error <= {_TOLERANCE:g}", met=error <= _TOLERANCE,
    )  # fmt: skip


class _Step:
    """A step of sequences with `counts` tokens each. Those with one token decode; the others are new."""

    def __init__(self, counts: Sequence[int], device: torch.device, *, quick: bool, batch_invariant: bool) -> None:
        torch.manual_seed(len(counts))
        key_heads, heads, dim, taps = (2, 4, 32, 4) if quick else (16, 32, 128, 4)
        channels = (2 * key_heads + heads) * dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device)

        self._net = GatedDeltaNet(
            conv=(draw(channels, taps) / 2).to(_BF16), a_log=draw(heads), dt_bias=draw(heads).to(_BF16),
            norm=(1 + 0.1 * draw(dim)).to(_BF16), eps=1e-6, key_heads=key_heads, key_dim=dim,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        tokens = sum(counts)
        self._qkvz, self._ba = draw(tokens, channels + heads * dim).to(_BF16), draw(tokens, 2 * heads).to(_BF16)
        slots = len(counts)
        self._state = RecurrentState(draw(slots, taps - 1, channels).to(_BF16), draw(slots, heads, dim, dim) / dim)
        lens = [count if count > 1 else _BEFORE for count in counts]
        self._rows = StateRows(
            torch.randperm(slots).to(device), torch.tensor(lens, dtype=torch.int32, device=device),
            torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32), max(counts),
        )  # fmt: skip
        states = sum(tensor.nbytes for tensor in self._state.tensors)
        read = sum(count == 1 for count in counts) / len(counts)  # new sequences start from zeros
        self.moved = self._qkvz.nbytes + self._ba.nbytes + 2 * tokens * heads * dim + (1 + read) * states

    def run(self) -> Tensor:
        return self._net(self._qkvz, self._ba, self._state, self._rows)

    def error(self) -> float:
        """The largest difference from the reference, of the outputs and of the states, over the largest value."""
        theirs = RecurrentState(self._state.window.clone(), self._matrix(self._state).clone())
        have = self.run()
        want = self._net.reference(self._qkvz, self._ba, theirs, self._rows)
        pairs = (have, want), (self._matrix(self._state), self._matrix(theirs))
        return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)

    @staticmethod
    def _matrix(state: RecurrentState) -> Tensor:
        assert state.matrix is not None
        return state.matrix
