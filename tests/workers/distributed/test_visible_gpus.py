"""Which GPUs a rank sees."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from coatcheck.workers.distributed.visible_gpus import show_gpus_of_group

UUIDS = ["GPU-1f", "GPU-2e"]


@pytest.mark.parametrize(
    ("masks", "want"),
    [
        (["5", "2"], [(0, "5,2"), (1, "5,2")]),
        (UUIDS, [(0, ",".join(UUIDS)), (1, ",".join(UUIDS))]),
        (["0", "0"], [(0, "0"), (0, "0")]),  # two ranks share a GPU
        (["0,1", "2"], [(0, "0,1"), (0, "2")]),
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


def show_all(store: Store, first: int, masks: list[str]) -> list[tuple[int, str]]:
    """(index, visible GPUs) of the ranks of this host, whose ids begin at `first` and end with the group's last."""

    def show(rank: int) -> tuple[int, str]:
        mask = masks[rank - first]
        environment = {"CUDA_VISIBLE_DEVICES": mask} if mask else {}
        index = show_gpus_of_group(store, rank, first + len(masks), environment)
        return index, environment.get("CUDA_VISIBLE_DEVICES", "")

    with ThreadPoolExecutor(len(masks)) as ranks:
        return list(ranks.map(show, range(first, first + len(masks))))
