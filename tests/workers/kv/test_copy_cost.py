"""When copying a block is faster than computing it."""

import pytest
import torch

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.kv.copy_cost import CopyCost
from coatcheck.workers.runner.block_copier import CpuBlockCopier

FAST = CopyCost(16, demote=1e-4, restore=1e-4, prefill=1e-3, step=0.02)
SLOW = CopyCost(16, demote=0.02, restore=0.02, prefill=1e-3, step=0.02)


def test_a_prefix_is_restored_where_that_is_sooner() -> None:
    """Fast copies are chosen over a slow prefill. Slow copies are not, nor is a restore behind a long queue."""
    assert FAST.is_restore_faster(100, num_queued=0, with_decodes=False)
    assert not SLOW.is_restore_faster(100, num_queued=0, with_decodes=False)
    assert not FAST.is_restore_faster(1, num_queued=1000, with_decodes=False)


def test_beside_decodes_a_short_prefix_is_computed() -> None:
    """Beside decodes one block waits for the next step, so its 16 tokens are computed. Many blocks are restored."""
    assert FAST.is_restore_faster(1, num_queued=0, with_decodes=False)
    assert not FAST.is_restore_faster(1, num_queued=0, with_decodes=True)
    assert FAST.is_restore_faster(50, num_queued=0, with_decodes=True)


def test_what_is_not_measured_is_tried() -> None:
    """Until prefill and copies have been measured, blocks are demoted and restored."""
    assert CopyCost(16).is_demotion_worthwhile and CopyCost(16).is_restore_faster(1, num_queued=9, with_decodes=True)
    assert CopyCost(16).max_blocks_per_step(with_decodes=True) > 0


def test_a_block_that_costs_more_to_move_than_to_make_is_not_kept() -> None:
    """A demotion and a restore against 16 tokens of prefill."""
    assert FAST.is_demotion_worthwhile and not SLOW.is_demotion_worthwhile


@pytest.mark.parametrize(("costs", "with_decodes", "blocks"), [(FAST, True, 30), (FAST, False, 200), (SLOW, True, 1)])
def test_a_step_moves_what_it_has_time_for(costs: CopyCost, with_decodes: bool, blocks: int) -> None:
    """A step copies for a share of its decode time, and always at least one block."""
    assert costs.max_blocks_per_step(with_decodes=with_decodes) == pytest.approx(blocks, abs=1)


def test_recovery_takes_the_faster_of_copying_and_computing() -> None:
    """Whole blocks are copied or computed, whichever is faster; the tokens behind them are computed."""
    assert FAST.recovery_seconds(36) == pytest.approx(2 * 2e-4 + 4e-3)
    assert SLOW.recovery_seconds(36) == pytest.approx(36e-3)


def test_one_slow_copy_does_not_change_the_cost() -> None:
    """A single slow copy does not change the measured cost, even if it is the first. Several do."""
    copier = CpuBlockCopier(torch.zeros(2, 8), torch.zeros(2, 8), Communicator())

    def measure(*seconds: float) -> float:
        for taken in seconds:
            copier.record_demotes(copier.add_copies(2), 2 * taken)
        report = copier.report_copies()
        assert report is not None and report.restore_seconds == 0
        return report.demote_seconds

    assert measure(1.0, 0.001) == measure(0.001, 1.0, 0.001) == pytest.approx(0.001)
    assert measure(1.0, 1.0) == pytest.approx(1.0)
