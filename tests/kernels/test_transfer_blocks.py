"""Copies of blocks between two pools, and their checksums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.kernels import native
from coatcheck.kernels.kv.transfer_blocks import sum_blocks, transfer_blocks, transfer_blocks_reference
from coatcheck.kernels.launch_check import LaunchRefused
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("transfer_blocks")]


def pools(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nine random blocks and seven of zeros."""
    return torch.randint(0, 256, (9, width), dtype=torch.uint8), torch.zeros(7, width, dtype=torch.uint8)


@pytest.mark.parametrize("width", [64, 640, 196_608])
@pytest.mark.parametrize("rows", [[], [5], [8, 0, 3]])
def test_every_byte_arrives_and_sums_agree_with_the_reference(width: int, rows: list[int]) -> None:
    """Every target has its source's bytes, no other block changes, and the checksums equal the reference's."""
    assert native.library() is not None, "the library is built where tests run"
    source, target = pools(width)
    from_rows, to_rows = torch.tensor(rows, dtype=torch.int64), torch.tensor([6, 1, 2][: len(rows)], dtype=torch.int64)
    wanted = target.clone()
    expected = transfer_blocks_reference(source, from_rows, wanted, to_rows)
    assert torch.equal(transfer_blocks(source, from_rows, target, to_rows), expected)
    assert torch.equal(target, wanted) and torch.equal(target[to_rows], source[from_rows])
    assert torch.equal(sum_blocks(source, from_rows), expected)


@given(bit=st.integers(0, 1024 * 8 - 1))
def test_one_flipped_bit_changes_the_checksum(bit: int) -> None:
    """A change of any one bit of a block changes its checksum."""
    block = torch.arange(1024).to(torch.uint8)[None]
    before = sum_blocks(block, torch.tensor([0]))
    block[0, bit // 8] ^= 1 << bit % 8
    assert sum_blocks(block, torch.tensor([0])) != before


def test_swapped_words_change_the_checksum() -> None:
    """Words that are swapped within a line of 64 bytes or across lines change the checksum."""
    block = torch.randint(0, 256, (1, 16, 8, 8), dtype=torch.uint8)
    rows = torch.tensor([0])
    sums = {int(sum_blocks(block.view(1, -1), rows))}
    for words, lines in (([1, 0, 2, 3, 4, 5, 6, 7], slice(None)), (slice(None), [1, 0, *range(2, 16)])):
        sums.add(int(sum_blocks(block[:, lines][:, :, words].reshape(1, -1), rows)))
    assert len(sums) == 3


def test_a_refusal_names_the_argument() -> None:
    """A wrong width, dtype or index is refused before anything is written, and the message names the argument."""
    source, target = pools(128)
    rows = torch.tensor([0])
    for name, call in (
        ("target", lambda: transfer_blocks(source, rows, target[:, :64], rows)),
        ("source", lambda: transfer_blocks(source[:, :100], rows, target[:, :100], rows)),
        ("source", lambda: transfer_blocks(source.char(), rows, target, rows)),
        ("from_rows", lambda: transfer_blocks(source, rows.int(), target, rows)),
        ("to_rows", lambda: transfer_blocks(source, rows, target, torch.tensor([0, 1]))),
    ):
        with pytest.raises(LaunchRefused, match=f"^{name}: expected "):
            call()
    assert not target.any()
