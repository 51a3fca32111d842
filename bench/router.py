"""What the router costs: tokens relayed from one group to many gRPC streams by one router process on one core.

There are three processes: a scripted group (a real Worker service that only counts), this one with the router, and a
client that reads and counts. In paced runs the group makes steps at a fixed rate, as an engine does. In flooded runs it
makes them as fast as they are read. The script also measures one routing decision: an 8k-token prompt, 64 groups, a
million indexed blocks.

    python bench/router.py [--streams 64] [--tokens 500] [--pace 100] [--tls] [--json out.json]

With `--tls` every connection is encrypted: the client's to the router, and the router's to the group (mutually).
"""

import asyncio
import multiprocessing
import random
import tempfile
import time
import timeit
import tracemalloc
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from coatcheck.bench.router_cases.group_and_client import byte_tokenizer, run_client, run_group
from coatcheck.bench.setup.results_file import write_results
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole, sign_certificates
from coatcheck.proto.block_hash import block_key, hash_chain
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, KvEvent, Load, Registration, SnapshotChunk
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.routing.routing_cost import choose_group
from coatcheck.router.server import Router


async def _measure(streams: int, tokens: int, pace: float, tls: bool) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    group_pipe, group_end = processes.Pipe()
    client_pipe, client_end = processes.Pipe()
    certificates = sign_certificates() if tls else CertificatesByRole()
    group = processes.Process(target=run_group, args=(group_end, streams, pace, certificates.group), daemon=True)
    group.start()
    aside = asyncio.get_running_loop().run_in_executor
    port = await aside(None, group_pipe.recv)
    with tempfile.TemporaryDirectory() as folder:
        cert, key = _files(certificates, Path(folder))
        router = Router(
            RouterConfig(model="m", cluster_certificate=certificates.router, tls_cert=cert, tls_key=key),
            byte_tokenizer(),
        )
        address = await router.start()
    await router.set_groups([GroupEndpoint("g", f"127.0.0.1:{port}")])
    while not router.groups.serving():
        await router.groups.next_change.wait()
    client = processes.Process(
        target=run_client, args=(client_end, address, streams, tokens, certificates.router), daemon=True
    )
    before = time.process_time()
    client.start()
    count, deltas, seconds = await aside(None, client_pipe.recv)
    cpu = time.process_time() - before
    await aside(None, client.join)
    await router.stop()
    group_pipe.send("stop")
    await aside(None, group.join)
    assert count == streams * tokens, "a token was lost"
    return {
        "streams": streams,
        "steps_per_second": pace,
        "tokens_per_second": count / seconds,
        "tokens_per_delta": count / deltas,
        "cpu_us_per_token": cpu / count * 1e6,
        "cpu_us_per_delta": cpu / deltas * 1e6,
        "tokens_per_cpu_second": count / cpu,
        "cores_used": cpu / seconds,
    }


def _files(certificates: CertificatesByRole, folder: Path) -> tuple[str | None, str | None]:
    """Write the group's certificate and key. The router uses them for its clients too: the cost is the same."""
    if certificates.group is None:
        return None, None
    (folder / "cert").write_bytes(certificates.group.certificate)
    (folder / "key").write_bytes(certificates.group.key)
    return str(folder / "cert"), str(folder / "key")


def _decide(groups: int = 64, blocks: int = 1_000_000, prompt: int = 8192, block_size: int = 16) -> dict[str, float]:
    """The time to hash, match and place one prompt. Every group holds another share of its blocks."""
    index = PrefixIndex()
    key = block_key(salt="", model="m", fingerprint="")
    tokens = list(range(prompt))
    chain = hash_chain(key, tokens, block_size)
    tracemalloc.start()
    for place in range(groups):
        name = f"g{place}"
        index.add_group(name, "1")
        own = chain[: len(chain) * (place + 1) // groups]
        rest = (
            place.to_bytes(8, "little") + block.to_bytes(8, "little") for block in range(blocks // groups - len(own))
        )
        pairs = [*zip(own, (b"", *own), strict=False), *((block, b"") for block in rest)]
        events = [
            KvEvent(stored=True, block_hash=block, parent_hash=parent, tier=TIER_DEVICE) for block, parent in pairs
        ]
        index.apply_snapshot(name, SnapshotChunk(epoch="1", events=events, first=True, last=True))
    del events
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    rng = random.Random(1)
    model = GetModelResponse(name="m", block_size=block_size)
    status = GroupStatus(waiting=1, blocks_total=20_000, prefill_tokens_per_second=5000.0, step_seconds=0.01)
    table = LoadTable()
    for slot in range(groups):
        load = GroupLoad(Registration(model=model, max_batch_tokens=2048), table, slot)
        load.apply_report(Load(status=status, queued_prefill_tokens=1000), now=0.0)
    names, slots = np.array([f"g{slot}" for slot in range(groups)], object), np.arange(groups)

    def decision() -> None:
        tokens = [blocks * block_size for blocks in index.match(chain)]
        choose_group(table.candidates(names, slots, *tokens), prompt, rng)

    def sending() -> None:
        index.add_expected("g0", 0, chain)
        index.remove_expected("g0", 0)

    return {
        "groups": groups,
        "indexed_blocks": index.entries,
        "bytes_per_block_and_group": memory / index.entries,
        "hash_us": min(timeit.repeat(lambda: hash_chain(key, tokens, block_size), number=20, repeat=5)) / 20 * 1e6,
        "match_us": min(timeit.repeat(lambda: index.match(chain), number=100, repeat=5)) / 100 * 1e6,
        "expect_and_settle_us": min(timeit.repeat(sending, number=100, repeat=5)) / 100 * 1e6,
        "decision_us": min(timeit.repeat(decision, number=100, repeat=5)) / 100 * 1e6,
    }


def main(
    streams: int = 64,
    tokens: int = 500,
    pace: Annotated[float, typer.Option(help="Steps a second of the paced run.")] = 100.0,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt every connection.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print one row per run: paced, flooded, and the cost of a decision."""
    rows = []
    for steps in (pace, 0.0):
        rows.append(asyncio.run(_measure(streams, tokens, steps, tls)))
        print("  ".join(f"{name} {value:,.1f}" for name, value in rows[-1].items()), flush=True)
    rows.append(_decide())
    print("  ".join(f"{name} {value:,.1f}" for name, value in rows[-1].items()), flush=True)
    write_results(json_path, rows)


if __name__ == "__main__":
    typer.run(main)
