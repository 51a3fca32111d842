"""The environment of a rank's process."""

import pytest

from coatcheck.workers.host.process_setup import show_assigned_gpus


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_a_rank_sees_its_own_gpus_where_ray_shows_all(vendor: str) -> None:
    """If Ray was told to leave the visible devices alone, the rank shows itself what Ray has assigned."""
    environment = {f"RAY_EXPERIMENTAL_NOSET_{vendor}_VISIBLE_DEVICES": "1", f"{vendor}_VISIBLE_DEVICES": "4,5,6,7"}
    show_assigned_gpus(["6"], environment)
    assert environment[f"{vendor}_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize("noset", ["", "0", None])
def test_what_ray_has_set_stays(noset: str | None) -> None:
    """By default Ray shows a process its own GPUs only."""
    environment = {"CUDA_VISIBLE_DEVICES": "6"}
    if noset is not None:
        environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = noset
    before = dict(environment)
    show_assigned_gpus(["6"], environment)
    assert environment == before


def test_a_rank_without_gpus_changes_nothing() -> None:
    """On CPUs Ray assigns no GPU."""
    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    show_assigned_gpus([], environment)
    assert "CUDA_VISIBLE_DEVICES" not in environment
