"""How long `coatcheck status` takes on a router with many groups.

A real router listens for gRPC. Simulated streams replace its groups: each registers, sends the load report of a group
with `--ranks` ranks, and sends nothing more. The command runs as operators run it, in its own process.

    python bench/scale_status.py [--groups 8 --groups 1000] [--ranks 8] [--json FILE]
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from coatcheck.bench.router_cases.group_and_client import byte_tokenizer
from coatcheck.bench.setup.results_file import update_results
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus, RankStatus
from coatcheck.proto.stubs.worker_pb2 import FromGroup, Load, Registration, SnapshotChunk, ToGroup
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups import group_connection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router

_ROUNDS = 5
_ranks = 8


class _SimulatedStream:
    """Stands in for a GroupStream."""

    def __init__(self, endpoint: GroupEndpoint, certificate: ClusterCertificate | None, *seconds: float) -> None:
        self._name = endpoint.name

    def send(self, message: ToGroup) -> None:
        """Drop the message: the simulated group answers nothing."""

    async def read(self, receive: Callable[[FromGroup], None]) -> None:
        model = GetModelResponse(name="m", block_size=16)
        registration = Registration(
            group=self._name, epoch="1", model=model, num_blocks=10_000, contract=CONTRACT, version=VERSION
        )
        receive(FromGroup(registration=registration))
        receive(FromGroup(snapshot=SnapshotChunk(epoch="1", first=True, last=True)))
        ranks = [RankStatus(rank=rank, node=f"node-{rank}", pid=1000 + rank, healthy=True) for rank in range(_ranks)]
        status = GroupStatus(running=12, waiting=3, blocks_used=4000, blocks_total=10_000, ranks=ranks)
        receive(FromGroup(load=Load(status=status)))
        await asyncio.Event().wait()


async def _run_command(*arguments: str) -> tuple[float, int]:
    """(seconds until the command ended, length of its output)."""
    began = time.monotonic()
    command = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("coatcheck")), *arguments, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await command.communicate()
    assert command.returncode == 0 and printed, f"{' '.join(arguments)} failed"
    return time.monotonic() - began, len(printed)


async def _measure(groups: int) -> dict[str, float]:
    router = Router(RouterConfig("m"), byte_tokenizer())
    address = await router.start()
    await router.set_groups([GroupEndpoint(f"group-{number}", f"10.0.0.1:{number + 1}") for number in range(groups)])
    while len(router.groups.serving()) < groups:
        await router.groups.next_change.wait()
    before = time.process_time()
    for _ in range(_ROUNDS):
        router.admin.report()
    seconds = (time.process_time() - before) / _ROUNDS
    figures = {"groups": groups, "router_ms": seconds * 1e3}
    for name, flags in (("json", ["--json"]), ("table", [])):
        runs = [await _run_command("status", "--address", address, *flags) for _ in range(_ROUNDS)]
        figures[f"{name}_seconds"] = statistics.median(seconds for seconds, _ in runs)
        figures[f"{name}_bytes"] = runs[0][1]
    await router.stop()
    return figures


def main(
    groups: Annotated[list[int], typer.Option(help="Numbers of groups.")] = [8, 64, 256, 1000],  # noqa: B006
    ranks: Annotated[int, typer.Option(help="Ranks of each group.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure each number of groups."""
    global _ranks
    _ranks = ranks
    setattr(group_connection, "GroupStream", _SimulatedStream)  # noqa: B010  # mypy knows no such export
    rows = []
    for count in groups:
        rows.append(asyncio.run(_measure(count)))
        print("  ".join(f"{name} {value:,.3f}" for name, value in rows[-1].items()), flush=True)
    update_results(json_path, status={"ranks": ranks, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
