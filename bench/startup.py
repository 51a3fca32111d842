"""How long `coatcheck serve` takes until its `ready:` line, with Ray and without, and where the time goes.

    python bench/startup.py [--rounds 5] [--model demo/model]

Starts alternate between the two ways. The phases are those that `serve` prints. A third table has the imports of a rank
in a new process each: as a rank imports them, and as any other program does.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Final

import typer

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS

_MODEL: Final = Path(__file__).parents[1] / "demo" / "model"
_SERVE: Final = [sys.executable, "-c", "from coatcheck.cluster.cli import main; main()", "serve"]
# The phase that ends with a line of `serve`, by the beginning of the line.
_PHASES: Final = {
    "starting Ray": "settings checked",
    "starting 1 group": "Ray has started",
    "loading weights": "libraries imported",
    "warming up": "weights loaded",
    "ready: ": "ready",
}
_FAST: Final = (
    "import gc; gc.disable(); from coatcheck.workers.host.fast_imports import import_transformers; "
    "import_transformers(); "
)
_MODULES: Final = "import coatcheck.workers.rank, transformers.models.llama.modeling_llama"


def time_start(model: Path, *flags: str) -> dict[str, float]:
    """Seconds from the start of the command to the end of each phase. A phase that passes between two looks at the
    ranks is left out."""
    began = time.perf_counter()
    process = subprocess.Popen([*_SERVE, str(model), "--grpc-port", "0", *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seconds: dict[str, float] = {}
    lines = []
    for line in process.stderr:
        lines.append(line)
        for beginning, phase in _PHASES.items():
            if line.startswith(beginning):
                seconds[phase] = time.perf_counter() - began
        if "ready" in seconds:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=MAX_WAIT_SECONDS)
    if "ready" not in seconds:
        raise SystemExit("".join(lines))
    return seconds


def time_imports(program: str) -> float:
    """Seconds of a new process that imports what a rank needs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - began


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each kind.")] = 5,
    model: Annotated[Path, typer.Option(help="A checkpoint directory.")] = _MODEL,
) -> None:
    """Print the median and the range of each phase's end."""
    starts: dict[str, dict[str, list[float]]] = {"with Ray": defaultdict(list), "without Ray": defaultdict(list)}
    imports: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, flags in (("with Ray", ()), ("without Ray", ("--no-ray",))):
            for phase, seconds in time_start(model, *flags).items():
                starts[name][phase].append(seconds)
        imports["as a rank"].append(time_imports(_FAST + _MODULES))
        imports["plain"].append(time_imports(_MODULES))
    for name, phases in starts.items():
        print(f"\n{name}: seconds until")
        for phase in _PHASES.values():
            if phase in phases:
                print(f"  {phase:20} {_summarize(phases[phase])}")
    print("\nimports of a rank: seconds")
    for name, measured in imports.items():
        print(f"  {name:20} {_summarize(measured)}")


def _summarize(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):5.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    typer.run(main)
