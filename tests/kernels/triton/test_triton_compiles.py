"""Each Triton kernel compiled ahead of time, without a GPU: for NVIDIA's sm_80 to sm_120 and AMD's gfx942.

The keys are those of kernel_keys.py. ahead_of_time.py writes their registers and memory to kernels/compiled_keys.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.layers.linear_keys import Keys
from tests.kernels.triton.ahead_of_time import GPUS, TARGETS, compiled, usage
from tests.kernels.triton.kernel_keys import KEYS, OTHERS

# Parts of the names of kernels with matrix products, for which each generation of GPUs has its own instructions.
_PRODUCTS = ("_tiles", "_gate_up", "_down", "linear", "_shrink", "_expand")


def launched(keys: Mapping[str, Keys]) -> list[tuple[str, str]]:
    """(name, target) of each key and each target whose GPUs launch it."""
    return [(name, target) for name, key in keys.items() for target in TARGETS if key(GPUS[target]) is not None]


def kind_of(name: str, target: str) -> tuple[str, bool]:
    """(the key's kernel, whether it converts FP8)."""
    key = KEYS[name](GPUS[target])
    assert key is not None
    kernel = str(key.kernel.__name__)
    return kernel, "fp8" in name or kernel == "_store_quantised"


def depends_on_generation(kernel: str, converts_fp8: bool) -> bool:
    """Whether NVIDIA's generations have different instructions for what the kernel does."""
    return converts_fp8 or any(part in kernel for part in _PRODUCTS)


def sampled(cases: list[tuple[str, str]]) -> list[Any]:
    """Parameters of these cases. `make test` compiles every key for sm_90, and one key of each kind for AMD and, if the
    kind depends on the generation, for NVIDIA's others."""
    seen: set[tuple[tuple[str, bool], str]] = set()
    parameters = []
    for name, target in cases:
        kind = kind_of(name, target)
        is_first = (kind, target) not in seen
        seen.add((kind, target))
        is_chosen = target == "sm_90" or (is_first and (target == "gfx942" or depends_on_generation(*kind)))
        parameters.append(pytest.param(name, target, marks=() if is_chosen else pytest.mark.full))
    return parameters


def check(key: Keys, target: str) -> None:
    wanted = key(GPUS[target])
    assert wanted is not None
    found = usage(compiled(wanted, target), target)
    assert found.shared <= GPUS[target].shared
    if target == "sm_90":
        assert found.spilled == 0


@pytest.mark.parametrize(("name", "target"), sampled(launched(KEYS)))
def test_compiles_without_a_gpu(name: str, target: str) -> None:
    """The kernel compiles for the target and fits its shared memory; on sm_90 it spills no register."""
    check(KEYS[name], target)


def test_the_sample_has_every_kernel_of_every_compiler() -> None:
    """`make test` compiles every kernel for AMD and NVIDIA, and those that depend on NVIDIA's generation for each."""
    chosen = [case.values for case in sampled(launched(KEYS)) if not case.marks]
    assert {name for name, target in chosen if target == "sm_90"} == KEYS.keys()
    compiled_for = {(kind_of(name, target), target) for name, target in chosen}
    for name, target in launched(KEYS):
        kind = kind_of(name, target)
        wanted = target in ("sm_90", "gfx942") or depends_on_generation(*kind)
        assert ((kind, target) in compiled_for) == wanted, (name, target)


@pytest.mark.full
@pytest.mark.parametrize(("name", "target"), launched(OTHERS))
def test_every_other_key_compiles_too(name: str, target: str) -> None:
    """Other head sizes, pools and groups compile within the same limits."""
    check(OTHERS[name], target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", ["fixed order", "LoRA shrink", "LoRA expand"])
def test_few_and_many_rows_take_the_same_matrix_instructions(target: str, kernel: str) -> None:
    """A linear in a fixed order, and an adapter, multiply with the same instructions, whether units are computed side
    by side or not, so that the order of additions within an instruction is the same."""
    keys = [KEYS[f"{kernel}, {rows}"](GPUS[target]) for rows in ("few", "many")]
    few, many = (set(re.findall(r"\w*mma[\w.:]*", compiled(key, target).asm["ptx"])) for key in keys if key is not None)
    assert few == many and any(".m16n8k16." in name or ".m64n128k16." in name for name in few), few


def test_the_table_knows_every_key() -> None:
    """A kernel or key that was added is in the table of kernels/compiled_keys.md."""
    text = (Path(__file__).parents[3] / "kernels/compiled_keys.md").read_text()
    assert [name for name in KEYS | OTHERS if f"| {name} |" not in text] == []
