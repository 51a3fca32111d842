"""A router in a process of its own, which measures how long its event loop cannot serve anybody.

    python -m tests.router.watched_router MODEL MAX_QUEUED NAME=HOST:PORT ...

Prints its addresses as a JSON line. Then each line on its input is answered with a JSON line: `begin` starts a
measurement, `end` returns the longest hold since then.

A hold is the time from one round of the event loop to the next. A task that is always ready to run makes the loop go
round without a pause, so that every hold is a time in which somebody waited: because a callback ran, or because another
thread kept the interpreter's lock. A hold counts as the smaller of two times: its wall time without the time in which
the loop's thread was ready and waited for a core, and the processor time that the whole process took meanwhile. Time
that other processes of the machine took is in neither. What threads compute beside the loop (with the lock released) is
not in the first.
"""

import asyncio
import gc
import json
import os
import sys
import time
from typing import Final

from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router

_REFERENCE_ROUNDS: Final = 300_000
_REFERENCE_BYTES: Final = 32 << 20
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"


class LoopWatch:
    """Runs beside whatever the event loop serves; `longest_hold` is in seconds."""

    def __init__(self) -> None:
        self.longest_hold = 0.0
        # Without scheduler statistics in the kernel, waiting for a core counts as wall time.
        self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY) if os.path.exists(_SCHEDSTAT) else None
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        wall, cpu = self._undelayed_time(), time.process_time()
        while True:
            await asyncio.sleep(0)
            next_wall, next_cpu = self._undelayed_time(), time.process_time()
            self.longest_hold = max(self.longest_hold, min(next_wall - wall, next_cpu - cpu))
            wall, cpu = next_wall, next_cpu

    def _undelayed_time(self) -> float:
        """Seconds of wall time, without those in which this thread was ready to run and had no core."""
        if self._schedstat is None:
            return time.perf_counter()
        # Nanoseconds on a core, nanoseconds ready without one, number of time slices.
        return time.perf_counter() - int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9


def reference_seconds() -> float:
    """Processor time of a fixed amount of the interpreter's work and of first writes to memory: how fast this machine
    is now. A virtual machine that has just started writes to new memory six times slower than later."""
    began = time.thread_time()
    total = len(bytearray(b"x") * _REFERENCE_BYTES)
    for number in range(_REFERENCE_ROUNDS):
        total += len(str(number))
    assert total
    return time.thread_time() - began


async def main(model: str, max_queued: str, *groups: str) -> None:
    """Serves until stdin ends."""
    router = Router(RouterConfig(model, served_model_name="tiny", http_port=0, hang_seconds=60.0,
                                 max_queued=int(max_queued)))  # fmt: skip
    grpc_address = await router.start()
    await router.set_groups([GroupEndpoint(name, address) for name, _, address in (g.partition("=") for g in groups)])
    while len(router.groups.serving()) != len(groups):
        await router.groups.next_change.wait()
    gc.freeze()  # as RouterActor does
    print(json.dumps({"grpc": grpc_address, "http": router.http_address}), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    watch = LoopWatch()
    while line := await commands.readline():
        answer = {"longest_hold": watch.longest_hold}
        if line == b"begin\n":
            answer = {"reference": reference_seconds()}
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            watch.longest_hold = 0.0
        print(json.dumps(answer), flush=True)
    await router.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
