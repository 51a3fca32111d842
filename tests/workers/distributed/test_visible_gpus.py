"""Which GPUs a rank sees."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.distributed.visible_gpus import check_equal_gpus, show_gpus_of_group

UUIDS = ["GPU-1f", "GPU-2e"]


@pytest.mark.parametrize(
    ("masks", "want"),
    [
        (["5", "2"], [(0, "5,2"), (1, "5,2")]),
        (UUIDS, [(0, ",".join(UUIDS)), (1, ",".join(UUIDS))]),
        (["0", "0"], [(0, "0"), (0, "0")]),  # two ranks share a GPU
        (["0,1", "2"], [(0, "0,1"), (0, "2")]),
        (["0", "GPU-2e"], [(0, "0"), (0, "GPU-2e")]),  # CUDA does not read such a list
        (["MIG-a", "MIG-b"], [(0, "MIG-a"), (0, "MIG-b")]),
        (["", ""], [(0, ""), (0, "")]),
    ],
)
def test_ranks_of_one_host_see_each_others_gpus(masks: list[str], want: list[tuple[int, str]]) -> None:
    """Ranks with one whole GPU each get the GPUs of all and the index of their own. Others keep what they see."""
    assert show_all(HashStore(), 0, masks) == want


def test_gpus_of_other_hosts_are_not_shown() -> None:
    """Of a group on two hosts a rank sees the GPUs of its own host, also where another host's have the same numbers."""
    store = HashStore()
    store.set("visible GPUs/0", json.dumps({"host": "another", "gpus": "5"}))
    assert show_all(store, 1, ["5", "2"]) == [(0, "5,2"), (1, "5,2")]


@pytest.mark.parametrize("other", ["compute capability 8.9", "no GPU"])
def test_ranks_with_different_gpus_are_refused(other: str) -> None:
    """Each rank names all GPUs. Without the check the ranks would wait for each other in unequal collectives."""
    kinds, store = ["compute capability 9.0", other], HashStore()
    with ThreadPoolExecutor(2) as ranks:
        checks = [ranks.submit(check_equal_gpus, store, rank, 2, kinds[rank]) for rank in range(2)]
        for check in checks:
            with pytest.raises(InvalidConfig, match=rf"\(rank 0: {kinds[0]}, rank 1: {other}\)"):
                check.result()
    check_equal_gpus(HashStore(), 0, 1, other)


def show_all(store: Store, first: int, masks: list[str]) -> list[tuple[int, str]]:
    """(index, visible GPUs) of the ranks of this host, whose ids begin at `first` and end with the group's last."""

    def show(rank: int) -> tuple[int, str]:
        mask = masks[rank - first]
        environment = {"CUDA_VISIBLE_DEVICES": mask} if mask else {}
        index = show_gpus_of_group(store, rank, first + len(masks), environment)
        return index, environment.get("CUDA_VISIBLE_DEVICES", "")

    with ThreadPoolExecutor(len(masks)) as ranks:
        return list(ranks.map(show, range(first, first + len(masks))))
