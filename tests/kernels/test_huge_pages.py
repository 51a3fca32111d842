"""Tensors on huge pages: layout, contents, and the memory that they return."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.kernels import huge_pages
from tests.examples import examples
from tests.resident_memory import resident_bytes, wait_until_populated


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=12))
def test_tensors_never_overlap(shapes: list[tuple[int, int]]) -> None:
    """Tensors of any sizes are aligned, read as zeros and keep the values that are written to them."""
    tensors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "_SHARED", 256 << 10)  # so that these tensors share mappings and have their own
        for number, shape in enumerate(shapes):
            tensor = huge_pages.zeros(shape, torch.bfloat16)
            assert tensor.shape == shape and tensor.is_contiguous() and not tensor.any()
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
            tensors.append(tensor.fill_(number + 1))
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number + 1).all())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages on this system")
def test_mappings_are_private_and_ask_for_huge_pages() -> None:
    """Linux has another setting for huge pages of shared memory, by default "never"."""
    tensor = huge_pages.zeros((64 << 20,), torch.uint8).fill_(1)
    permissions, flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(address, 16) for address in first.split("-"))
            is_ours = start <= tensor.data_ptr() < end
            permissions = rest[0] if is_ours else permissions
        elif is_ours and first == "VmFlags:":
            flags = " ".join(rest)
    assert permissions == "rw-p"
    assert "hg" in flags.split()


def test_memory_goes_back_with_the_last_tensor() -> None:
    """The pages of a dropped tensor are returned to the system."""
    tensor = huge_pages.zeros((64 << 20,), torch.uint8).fill_(1)
    held = resident_bytes()
    assert tensor.data_ptr() % (2 << 20) == 0
    del tensor
    gc.collect()
    assert held - resident_bytes() > 60 << 20


def test_pages_are_allocated_in_the_background() -> None:
    """All pages of a tensor that nobody reads or writes are allocated, and what is written meanwhile stays."""
    before = resident_bytes()
    tensor = huge_pages.zeros((96 << 20,), torch.uint8)
    huge_pages.populate_in_background(tensor)
    tensor[:: 1 << 20] = 7
    wait_until_populated()
    assert resident_bytes() - before > 90 << 20
    assert int(tensor.sum(dtype=torch.int64)) == 7 * 96


def test_a_dropped_tensor_may_still_be_populated() -> None:
    """A tensor that is dropped while its pages are allocated is freed once that has ended."""
    before = resident_bytes()
    huge_pages.populate_in_background(huge_pages.zeros((64 << 20,), torch.uint8))
    wait_until_populated()
    gc.collect()
    assert resident_bytes() - before < 16 << 20
