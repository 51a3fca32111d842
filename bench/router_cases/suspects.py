"""CPU time of the router for each suspect, a request that may have crashed groups. Suspects run one after another.

`--waiting` requests with the highest suspicion wait for one scripted group. Each is sent, gets a little output and is
cleared, so that the next one runs.

    python bench/router_cases/suspects.py [--waiting 1000]
"""

import asyncio
import multiprocessing
import time
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.group_and_client import run_group
from coatcheck.proto.sampling import SamplingParams
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.admission_queue import AdmissionQueue, Attempt
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics


async def _measure(waiting: int) -> float:
    processes = multiprocessing.get_context("spawn")
    pipe, end = processes.Pipe()
    group = processes.Process(target=run_group, args=(end, 10 * waiting, 1.0, None), daemon=True)  # never answers
    group.start()
    port = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    groups = GroupRegistry(RouterConfig(model="m"))
    dispatcher = Dispatcher(groups, AdmissionQueue(0))
    await groups.set_endpoints([GroupEndpoint("g", f"127.0.0.1:{port}")])
    while not groups.serving():
        await groups.next_change.wait()

    lifecycle = RequestLifecycle(RequestMetrics(CollectorRegistry()))

    async def run(number: int, release: asyncio.Event) -> None:
        request = Request(f"r{number}", [1, 2, 3], SamplingParams(max_tokens=20, seed=7))
        submission = await dispatcher.send(Attempt(request, lifecycle, 1, suspicion=2), wait_seconds=600.0)
        await release.wait()
        for _ in range(3):  # its answer takes a while
            await asyncio.sleep(0)
        submission.set_suspicion(0)
        submission.close(finished=True)

    release = asyncio.Event()
    runs = [asyncio.create_task(run(number, release)) for number in range(waiting)]
    for _ in range(10):  # until one has the group and all others wait
        await asyncio.sleep(0)
    before = time.process_time()
    release.set()
    await asyncio.gather(*runs)
    spent = time.process_time() - before
    await groups.close()
    group.terminate()
    return spent


def main(waiting: Annotated[int, typer.Option(min=2, help="Requests that wait.")] = 1000) -> None:
    """Print the CPU time of all, and of each."""
    spent = asyncio.run(_measure(waiting))
    print(f"{waiting} suspects: {spent:.3f} s of CPU, {spent / waiting * 1e6:.0f} us each")


if __name__ == "__main__":
    typer.run(main)
