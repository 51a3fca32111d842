"""Shows a rank the GPUs of all ranks of its group on its host, so that they can map each other's memory. Checks that
the ranks of a group have equal GPUs.

Ray and `serve --no-ray` show a rank its own GPU alone. Every rank's GPU then has the index 0, and torch refuses to map
the memory of another rank, because its GPU has the same index.
"""

import json
from collections.abc import MutableMapping

from torch._C._distributed_c10d import Store

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.distributed.shm_collectives import host_id

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def show_gpus_of_group(store: Store, rank: int, size: int, environment: MutableMapping[str, str]) -> int:
    """Make the GPUs of all ranks on this host visible, in rank order. Returns the index of this rank's GPU.

    A collective: every rank calls this before CUDA starts. If the ranks of this host were not shown one whole GPU each,
    nothing changes, and the index is 0. That is so on CPUs, and with parts of GPUs (MIG), because a process can use
    only one part. CUDA does not read a list of numbers and UUIDs, so these are not mixed either.
    """
    store.set(f"visible GPUs/{rank}", json.dumps({"host": host_id(), "gpus": environment.get(_VARIABLE, "")}))
    ranks = [json.loads(store.get(f"visible GPUs/{each}")) for each in range(size)]
    host = ranks[rank]["host"]
    gpus = [each["gpus"] for each in ranks if each["host"] == host]
    if len(set(gpus)) < len(gpus) or any(not gpu or "," in gpu or gpu.startswith("MIG") for gpu in gpus):
        return 0
    if len({gpu.isdigit() for gpu in gpus}) > 1:
        return 0
    environment[_VARIABLE] = ",".join(gpus)
    return sum(each["host"] == host for each in ranks[:rank])


def check_equal_gpus(store: Store, rank: int, size: int, kind: str) -> None:
    """Raise InvalidConfig on every rank if the ranks' GPUs are of different kinds.

    Tiles, and with them the shapes of CUDA graphs, depend on the compute capability: ranks that choose different shapes
    would call different collectives, and wait for each other until a timeout. So would a rank without a GPU.
    A collective. `kind`: "compute capability 9.0", or "no GPU".
    """
    store.set(f"kind of GPU/{rank}", kind)
    kinds = [store.get(f"kind of GPU/{each}").decode() for each in range(size)]
    if len(set(kinds)) > 1:
        listed = ", ".join(f"rank {index}: {each}" for index, each in enumerate(kinds))
        raise InvalidConfig(
            f"the ranks of a group need GPUs of one compute capability ({listed}); place each group on equal GPUs, or "
            "use --device cpu"
        )
