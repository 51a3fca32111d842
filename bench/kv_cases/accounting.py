"""Compares `coatcheck plan` with `coatcheck serve`: blocks, bytes of a block, and memory of the ranks' processes.

    python bench/kv_cases/accounting.py [--json bench/results/kv_accounting.json]

The demo model is served for each KV dtype and number of ranks, with `--gib` of pool and of host tier per rank. The
baseline is a server of as many ranks with a pool of 4 MiB. The memory of the ranks above the baseline must be what
their pools and host tiers have reserved, within 1%.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.servers import CoatcheckServer
from coatcheck.proto.stubs import coatcheck_pb2 as pb

_MODEL = Path(__file__).parents[2] / "demo" / "model"
_KV_DTYPES = ("bf16", "fp16", "fp8", "int8", "int4")


def main(
    gib: Annotated[float, typer.Option(help="GiB of the pool, and of the host tier, of each rank.")] = 0.5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure, and fail if a figure is off."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # ends the server too
    size, rows = int(gib * 2**30), []
    for tp in (1, 2):
        bare = serve(tp, "bf16", 4 << 20, 0)[1]
        for kv_dtype in _KV_DTYPES:
            rows.append(measure(tp, kv_dtype, size, bare))
            print(json.dumps(rows[-1]), flush=True)
    write_results(json_path, {**describe_machine(), "gib": gib, "rows": rows})
    wrong = [row for row in rows if not row["as_planned"] or abs(row["held_over_reserved"] - 1) > 0.01]
    sys.exit(f"{len(wrong)} of {len(rows)} are off: {wrong}" if wrong else 0)


def measure(tp: int, kv_dtype: str, size: int, bare: float) -> dict[str, Any]:
    """The figures of one server beside its plan. `bare`: a rank's memory in the baseline, in bytes."""
    command: list[str | Path] = [Path(sys.executable).with_name("coatcheck"), "plan", _MODEL, "--json", "--tp", str(tp)]
    command += ["--kv-dtype", kv_dtype, "--kv-memory", str(size)]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    group, resident = serve(tp, kv_dtype, size, size)
    reserved = (group.blocks_total + group.host_blocks_total) * group.bytes_per_block
    planned = plan["num_blocks"], plan["rank_bytes_per_block"]
    return {
        "tp": tp,
        "kv_dtype": kv_dtype,
        "blocks": group.blocks_total,
        "host_blocks": group.host_blocks_total,
        "bytes_per_block": group.bytes_per_block,
        "as_planned": planned == (group.blocks_total, group.bytes_per_block),
        "held_over_reserved": (resident - bare) / reserved,
    }


def serve(tp: int, kv_dtype: str, size: int, host: int) -> tuple[pb.GroupStatus, float]:
    """Start a server. Return (status of its group, mean anonymous memory of a rank in bytes)."""
    flags = f"--tp {tp} --kv-dtype {kv_dtype} --kv-memory {size} --host-kv-memory {host}"
    with TemporaryDirectory() as scratch, CoatcheckServer(_MODEL, Path(scratch), flags) as server:
        while not (group := server.status()).ranks:  # the ranks have not reported yet
            time.sleep(0.1)
        return group, sum(_resident(rank.pid) for rank in group.ranks) / tp


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


if __name__ == "__main__":
    typer.run(main)
