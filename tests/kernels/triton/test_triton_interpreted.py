"""The Triton kernels in Triton's interpreter on CPU, against the references.

Triton chooses the interpreter when a kernel is decorated. So kernel_checks.py, beside this file, runs in new processes
with TRITON_INTERPRET=1. bfloat16 has its own process, because mended_bfloat16.py changes the interpreter for it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS


@pytest.mark.parametrize(
    "groups",
    [
        "attention matrix long order elements quantised stores rows empty sampling filters penalties probabilities "
        "'short convolutions'",
        "sums routes products linears LoRA W8A8 'W8A8 experts' fixed packed latents 'delta nets' Mamba-2 ranks",
        "bfloat16",
    ],
)
def test_the_interpreted_kernels_agree_with_their_references(groups: str) -> None:
    """Attention, stores, copies, norm, rotary, activation, experts, linears, layers with a state, filters, penalties
    and draw agree with the references."""
    run(shlex.split(groups), MAX_PROGRAM_SECONDS)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_combination_of_attentions_features_agrees() -> None:
    """Head sizes, pools, MHA, GQA and MQA, windows, caps and sinks: all of the matrix that `make test` samples."""
    run(["whole matrix"], 1700)


def run(groups: list[str], seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.kernel_checks", *groups],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("agreed\n")
