"""CPU of the supervisor by the numbers of groups and routers: while nothing changes, and for each change of a group.

The real GroupSet and RouterSet adopt groups and routers and supervise them. They run in this process, without Ray,
because 100 routers and 1,000 groups are too many processes for a small machine. Each handle has a transport that
pickles the arguments as Ray does, counts the call and its bytes, and answers at once. The other cost of a call is
measured first, between real Ray actors (`ray_call_us`, CPU of the caller), and added for every call.

    python bench/scale_supervisor.py [--groups 8 --groups 1000] [--routers 1 --routers 100] [--json FILE]
"""

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import ray
import typer
from ray import cloudpickle

from coatcheck.bench.setup.results_file import update_results
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.placement_plan import plan_placement
from coatcheck.cluster.supervision import group_set, rank_actors
from coatcheck.cluster.supervision.group_set import GroupSet
from coatcheck.cluster.supervision.router_set import RouterSet
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.actor import RouterReport
from coatcheck.router.event_loop.heartbeat import Heartbeat
from coatcheck.router.groups.group_list import NO_LIST, GroupListUpdate
from coatcheck.workers.core.rank_progress import Phase, RankProgress

_SETTLE_SECONDS = 3.0
# Long enough that each of 1,000 groups is checked at least once.
_IDLE_SECONDS, _IDLE_SECONDS_PER_GROUP = 10.0, 0.045
_CHANGES = 100
_RAY_CALLS = 2000


class _Transport:
    """Counts the calls to all actors, and the bytes of their arguments."""

    def __init__(self) -> None:
        self.calls = self.num_bytes = 0

    def count_call(self, arguments: tuple[object, ...]) -> None:
        self.calls += 1
        self.num_bytes += len(cloudpickle.dumps(arguments))  # type: ignore[no-untyped-call]


class _Actor:
    """A handle whose methods answer at once with `answers[name](*arguments)`. A method whose answer is "never" does not
    answer."""

    def __init__(self, transport: _Transport, answers: dict[str, Callable[..., object] | str]) -> None:
        self._transport = transport
        self._answers = answers

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*arguments: object) -> "asyncio.Future[object]":
            self._transport.count_call(arguments)
            answer = asyncio.get_running_loop().create_future()
            if not isinstance(call := self._answers[name], str):
                answer.set_result(call(*arguments))
            return answer

        return SimpleNamespace(remote=remote)


def _router(transport: _Transport) -> _Actor:
    held = [NO_LIST]

    def update_groups(pickled: bytes) -> object:
        update: GroupListUpdate = cloudpickle.loads(pickled)
        held[0] = update.version
        return held[0]

    return _Actor(
        transport,
        {
            "start": lambda: "10.0.0.1:50051",
            "http_address": lambda: "10.0.0.1:8000",
            "update_groups": update_groups,
            "report": lambda: RouterReport(Heartbeat(0.0, 0.0), held[0]),
            "status": lambda: StatusResponse(),
        },
    )


def _rank(transport: _Transport, number: int) -> _Actor:
    progress = RankProgress(Phase.SERVING, address=f"10.0.{number // 250}.{number % 250}:40000")
    return _Actor(transport, {"log_file": lambda: "log", "progress": lambda: progress, "watch": "never"})


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _measure(groups: int, routers: int, ray_call_seconds: float) -> dict[str, float]:
    transport = _Transport()
    nodes = [f"node-{number}" for number in range(routers)]
    replacements: list[tuple[object, str, object]] = [
        (launch, "find_router", lambda name: _router(transport)),
        (launch, "router_nodes", lambda resource: nodes),
        (launch, "find_ranks", lambda group, tp: (0, [_rank(transport, int(group.rpartition("-")[2]))])),
        (launch, "reserve_placement_group", lambda *arguments: SimpleNamespace()),
        (launch, "bundle_nodes", lambda placement_group: ["node-0"]),
        (ray_kv, "read_number", lambda key: None),
        (ray_kv, "write_number", lambda key, value: None),
        (group_set, "group_config", lambda config, name, device, certificate: SimpleNamespace(name=name, tp=1)),
        (rank_actors, "node_id", lambda: "node-0"),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    settings = {"model": "m", "groups": groups, "router_per_node": True, "ray_address": "10.0.0.1:6379"}
    config = ServeConfig.build(settings)
    plan = plan_placement("cpu", groups, 1, [(f"node-{number}", {"CPU": 1.0}) for number in range(groups)])
    router_set = RouterSet(config, None, has_served=True)
    all_groups = GroupSet(config, plan, None, router_set, is_restarted=True)
    figures: dict[str, float] = {"groups": groups, "routers": routers}
    idle_seconds = max(_IDLE_SECONDS, _IDLE_SECONDS_PER_GROUP * groups)

    async def measure() -> None:
        await asyncio.sleep(_SETTLE_SECONDS)
        calls, cpu = transport.calls, _cpu_seconds()
        await asyncio.sleep(idle_seconds)
        calls, cpu = transport.calls - calls, _cpu_seconds() - cpu
        figures["idle_calls_per_second"] = calls / idle_seconds
        figures["idle_percent_of_a_core"] = 100 * (cpu + calls * ray_call_seconds) / idle_seconds
        calls, num_bytes, cpu = transport.calls, transport.num_bytes, _cpu_seconds()
        supervisor = all_groups._supervisors[0]
        for number in range(_CHANGES):
            (supervisor.undrain_group if number % 2 else supervisor.drain_group)()
            for _ in range(10):  # until every router has been told
                await asyncio.sleep(0)
        cpu = (_cpu_seconds() - cpu) / _CHANGES
        figures["change_calls"] = (transport.calls - calls) / _CHANGES
        figures["change_ms"] = cpu * 1e3
        figures["change_with_calls_ms"] = (cpu + figures["change_calls"] * ray_call_seconds) * 1e3
        figures["change_bytes_per_router"] = (transport.num_bytes - num_bytes) / _CHANGES / routers

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(router_set.supervise_routers(tasks))
        await all_groups.start_groups(tasks)
        await measure()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    return figures


class _Caller:
    """A Ray actor that calls another one, as the supervisor does."""

    async def measure(self, callee: Any, calls: int) -> float:
        """CPU seconds of this process for each call and its answer."""
        await callee.answer.remote(b"")
        before = _cpu_seconds()
        for _ in range(calls // 100):
            await asyncio.gather(*(callee.answer.remote(b"") for _ in range(100)))
        return (_cpu_seconds() - before) / calls


class _Callee:
    """A Ray actor that answers at once."""

    async def answer(self, argument: bytes) -> bytes:
        return argument


def measure_ray_call() -> float:
    """CPU seconds of the caller for one call between two Ray actors."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        caller: Any = ray.remote(_Caller).options(num_cpus=0).remote()
        callee = ray.remote(_Callee).options(num_cpus=0).remote()
        return float(ray.get(caller.measure.remote(callee, _RAY_CALLS)))
    finally:
        ray.shutdown()


def main(
    groups: Annotated[list[int], typer.Option(help="Numbers of groups.")] = [8, 64, 256, 1000],  # noqa: B006
    routers: Annotated[list[int], typer.Option(help="Numbers of routers.")] = [1, 10, 100],  # noqa: B006
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure each pair of numbers."""
    ray_call_seconds = measure_ray_call()
    print(f"a Ray call takes {ray_call_seconds * 1e6:.0f} us of CPU", flush=True)
    rows = []
    for group_count in groups:
        for router_count in routers:
            rows.append(asyncio.run(_measure(group_count, router_count, ray_call_seconds)))
            print("  ".join(f"{name} {value:,.2f}" for name, value in rows[-1].items()), flush=True)
    update_results(json_path, supervisor={"ray_call_us": ray_call_seconds * 1e6, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
