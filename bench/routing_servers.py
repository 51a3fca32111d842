"""TTFT, TPOT and cache hits of real servers under each --routing, with one system prompt that all requests share.

    python bench/routing_servers.py [--rate 4 --rate 16] [--json bench/results/routing_servers.json]

Each policy has its own `coatcheck serve`, with groups of one rank that serve demo/model. All servers run at the same
time, but only one has load: in each round `coatcheck bench` loads them in turn, so that changes of the machine's speed
affect all. Every run of `coatcheck bench` has a new cache salt, so it begins with an empty prefix cache. A figure is
the median over the rounds.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, get_args

import typer

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.servers import CoatcheckServer
from coatcheck.proto.setting_names import Routing

MODEL: Final = Path(__file__).resolve().parents[1] / "demo" / "model"
# Figure -> column of the table. Seconds are in ms; the last column is the largest group's requests / the mean.
COLUMNS: Final = {
    "ttft_p50": "TTFT p50", "ttft_p90": "p90", "ttft_p99": "p99", "tpot_p50": "TPOT p50", "tpot_p90": "p90",
    "tokens_per_second": "tokens/s", "hit_ratio": "hits", "groups_used": "groups", "max_over_mean": "max/mean",
}  # fmt: skip
POLICIES: Final = get_args(Routing)
Figures = dict[str, float]


def main(
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second, Poisson; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of a run.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy at each rate.")] = 3,
    groups: Annotated[int, typer.Option(min=1, help="Groups of one rank behind each router.")] = 4,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of the shared prompt.")] = 1024,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a request's own prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 16,
    kv_memory: Annotated[str, typer.Option(help="KV pool of each rank.")] = "64MiB",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Print a row for each rate and policy."""
    prompts = f"--prompts shared-prefix --num-prefixes 1 --prefix-len {prefix_len} --input-len {input_len}"
    load = f"{prompts} --output-len {output_len}"
    cells = [(each, policy) for each in rate or (4.0, 16.0) for policy in POLICIES]
    runs: dict[tuple[float, str], list[Figures]] = {cell: [] for cell in cells}
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        flags = f"--groups {groups} --kv-memory {kv_memory}"
        servers = {policy: stack.enter_context(start_server(policy, Path(scratch), flags)) for policy in POLICIES}
        for server in servers.values():
            wait_for_groups(server, groups)
        for turn in range(rounds):
            for each, policy in cells if turn % 2 == 0 else cells[::-1]:
                print(f"{policy} at {each:g}/s, round {turn + 1} of {rounds}", file=sys.stderr)
                words = f"{load} --rate {each} --num-requests {round(each * seconds)} --seed {2 * turn}"
                runs[each, policy].append(figures_of(servers[policy].run_bench(words), groups))
    print("| " + " | ".join(("rate", "policy", *COLUMNS.values())) + " |\n|" + "---|" * (2 + len(COLUMNS)))
    rows = []
    for each, policy in cells:
        median = {name: statistics.median(run[name] for run in runs[each, policy]) for name in COLUMNS}
        rows.append({"rate": each, "policy": policy, **median, "rounds": runs[each, policy]})
        values = [f"{value:.2f}" if value < 10 else f"{value:,.0f}" for value in median.values()]
        print(f"| {each:g} | {policy} | {' | '.join(values)} |")
    write_results(json_path, {**describe_machine(), "load": load, "groups": groups, "rows": rows})


def start_server(policy: str, scratch: Path, flags: str) -> CoatcheckServer:
    (directory := scratch / policy).mkdir()
    return CoatcheckServer(MODEL, directory, f"{flags} --routing {policy}")


def wait_for_groups(server: CoatcheckServer, count: int) -> None:
    """Wait until `count` groups serve. Raises TimeoutError."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while sum(group.state == "serving" for group in server.group_statuses()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {MAX_WAIT_SECONDS} s not all of {count} groups serve")
        time.sleep(0.1)


def figures_of(report: dict[str, Any], groups: int) -> Figures:
    """The figures of one run of `coatcheck bench`, by their names in COLUMNS."""
    latencies = {
        f"{name}_{share}": report[f"{name}_ms"][share] for name in ("ttft", "tpot") for share in ("p50", "p90", "p99")
    }
    counts = report["groups"].values()
    return {
        **latencies,
        "tokens_per_second": report["output_tokens_per_second"],
        "hit_ratio": (report["cached_device_tokens"] + report["cached_host_tokens"]) / report["prompt_tokens"],
        "groups_used": len(counts),
        "max_over_mean": max(counts) * groups / sum(counts),
    }


if __name__ == "__main__":
    typer.run(main)
