"""Throughput of more routers: tokens relayed by one, two and four routers of one group, each with a share of a core.

The share (a cgroup's quota) makes each router the bottleneck, as its own core would on a larger machine; the scripted
group and the clients, one for each router, have what is left. Routers share nothing but the group.

    python bench/router_cases/routers.py [--routers 1 --routers 2 --routers 4]
        [--share 0.2] [--streams 32] [--json out.json]
"""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.bench.router_cases.group_and_client import byte_tokenizer, run_client, run_group
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router

_PERIOD_US = 10_000  # short, so that a throttled process waits only briefly
_CGROUPS = Path("/sys/fs/cgroup")


def run_router(pipe: Connection, port: int) -> None:
    """Run a router. Send its address when it serves the group; stop at the next message."""

    async def serve() -> None:
        router = Router(RouterConfig(model="m"), byte_tokenizer())
        address = await router.start()
        await router.set_groups([GroupEndpoint("g", f"127.0.0.1:{port}")])
        while not router.groups.serving():
            await router.groups.next_change.wait()
        pipe.send(address)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await router.stop()

    asyncio.run(serve())


def measure(routers: int, share: float, streams: int, tokens: int) -> dict[str, float]:
    """All streams of all routers at once, from the first that begins to the last that ends."""
    processes = multiprocessing.get_context("spawn")

    def start(target: Any, *args: object) -> tuple[Any, Connection]:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        return process, ours

    group, group_pipe = start(run_group, streams, 0.0, None)
    port = group_pipe.recv()
    router_processes = [start(run_router, port) for _ in range(routers)]
    addresses = [pipe.recv() for _, pipe in router_processes]
    with ExitStack() as shares:
        for process, _ in router_processes:
            shares.enter_context(cpu_share(process.pid, share))
        clients = [start(run_client, address, streams, tokens, None) for address in addresses]
        answers = [pipe.recv() for _, pipe in clients]
        for process, _ in clients:
            process.join()
    for process, pipe in (*router_processes, (group, group_pipe)):
        pipe.send("stop")
        process.join()
    count = sum(counted for counted, _, _ in answers)
    assert count == routers * streams * tokens, "a token was lost"
    return {
        "routers": routers,
        "cores_each": share,
        "streams_each": streams,
        "tokens_per_second": sum(counted / seconds for counted, _, seconds in answers),
        "slowest_over_fastest": max(answer[2] for answer in answers) / min(answer[2] for answer in answers),
    }


@contextmanager
def cpu_share(pid: int, cores: float) -> Iterator[None]:
    """Limit a process to `cores` cores inside the context, by a cgroup (version 1 or 2) with a quota.

    Raises PermissionError if the cgroup cannot be made: usually only root has the right to.
    """
    group = _make_cgroup(f"share-{os.getpid()}-{pid}", round(cores * _PERIOD_US))
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(member)
        group.rmdir()


def _make_cgroup(name: str, quota_us: int) -> Path:
    first = (_CGROUPS / "cpu" / "cpu.cfs_quota_us").parent
    parent = first if first.is_dir() else _CGROUPS
    group = parent / name
    try:
        group.mkdir()
    except OSError as error:
        raise PermissionError(f"cannot make the cgroup {group}: {error.strerror}; this needs root") from error
    if parent is first:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    return group


def main(
    routers: Annotated[list[int] | None, typer.Option(min=1, help="Number of routers; may be repeated.")] = None,
    share: Annotated[float, typer.Option(min=0.05, max=1.0, help="Share of a core for each router.")] = 0.2,
    streams: Annotated[int, typer.Option(min=1, help="Streams of each router.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each stream.")] = 1500,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print a row per number of routers, with its ratio to the first row."""
    rows: list[dict[str, float]] = []
    for count in routers or (1, 2, 4):
        row = measure(count, share, streams, tokens)
        rows.append(row | {"ratio": row["tokens_per_second"] / (rows[0] if rows else row)["tokens_per_second"]})
        print("  ".join(f"{name} {value:,.2f}" for name, value in rows[-1].items()), flush=True)
    write_results(json_path, {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
