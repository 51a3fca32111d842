"""A rank from start to end on a simulated GPU: for test_simulated_gpu.py, in a process of its own.

It loads a model, warms up the kernels, captures its graphs and serves over gRPC: one prompt twice, and in between more
than its pool holds.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.rank import Rank
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.install import install
from tests.workers.rank_client import generate

_PROMPT = list(range(3, 23))


class WatchedRank(Rank):
    """A rank with a client that submits requests as soon as the rank serves."""

    gpu: SimulatedGpu
    threads: ThreadPoolExecutor
    answers: Any = None

    def _update_progress(self, **changed: Any) -> None:
        super()._update_progress(**changed)
        if "address" in changed:
            self.answers = self.threads.submit(self._ask)

    def _ask(self) -> list[list[int]]:
        address = self.progress.address
        try:
            self.gpu.waits.clear()
            before = generate(address, _PROMPT, 3)
            for token in (50, 51, 52):
                generate(address, [token] * 40, 2)
            return [before, generate(address, _PROMPT, 3)]
        finally:
            self.stop()


def main() -> None:
    config = GroupConfig(
        "g", sys.argv[1], "tiny", kv_memory=1 << 16, host_kv_memory=1 << 17, dtype="float32", device="cuda", threads=1,
        max_num_seqs=2, max_batch_tokens=24, max_model_len=64,
    )  # fmt: skip
    rank = WatchedRank(config, 0)
    rank.gpu = install()
    with ThreadPoolExecutor(1) as rank.threads:
        rank.run("127.0.0.1:0")
    before, after = rank.answers.result()
    assert before == after and len(after) == 3, (before, after)
    assert set(rank.gpu.waits) == {"event"} and rank.compile_watch.num_late() == 0, rank.gpu.waits
    print(*after)


if __name__ == "__main__":
    main()
