"""The Triton kernels in Triton's interpreter on CPU, against the references.

The interpreter is chosen as a kernel is decorated, so it runs in a process of its own (interpreted.py beside this
file), one per group of kernels, with TRITON_INTERPRET=1. It is wrong in bfloat16: float32 and float16 are proved here,
bfloat16 by compilation and on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("group", ["attention", "quantised", "rows", "sampling"])
def test_the_interpreted_kernels_agree_with_their_references(group: str) -> None:
    """Decode, prefill, store, copy, norm, rotary, activation and draw give what their references give."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", group],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("agreed\n")
