"""Checks on an NVIDIA GPU that kernels and models compute what the CPU computes: `make test-gpu`.

    python tests/gpu/run.py                                  # the default cases, as many at once as there are cores
    python tests/gpu/run.py --only kernels,families          # parts
    python tests/gpu/run.py --only "families: llama" --jobs 4
    python tests/gpu/run.py --all --out DIR --json           # every case

| part | what |
|---|---|
| kernels | each kernel beside its reference |
| families | tiny models of the families with our own layers: KV pools of every kind, --deterministic, bfloat16 |
| quantised | quantised checkpoints, --quantization, quantised activations |
| architectures | a tiny model of every other type that docs/models.md lists |
| adapters | LoRA adapters are refused |

A model's engine on the GPU has CUDA graphs, a prefix cache, a host tier and preemptions; its tokens and
log-probabilities are those of the engine on the CPU (comparison.py). The program needs torch, triton, transformers and
this checkout. Coatcheck need not be installed. If it is built (`pip install .`), the CPU's engine runs its C kernels.

Each case has a time limit, and a log in --out. The last lines are a table. The exit code is 1 if a case failed, 2 if
there is no GPU. A model that the GPU's path refuses is listed and is no failure: docs/models.md has the reasons.
`--device cpu` puts a second engine on the CPU in the GPU's place, to test the program itself.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import make_importable  # noqa: E402

make_importable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402

from tests.gpu.parts import PARTS, limit_of, list_cases  # noqa: E402
from tests.gpu.report import Report  # noqa: E402
from tests.gpu.worker import serve_cases  # noqa: E402
from tests.gpu.workers import run_cases  # noqa: E402


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.py")
    parser.add_argument("--only", default="", help=f"parts or beginnings of cases, with commas: {', '.join(PARTS)}")
    parser.add_argument("--all", action="store_true", help="every variant, pool and format")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that share the GPU")
    parser.add_argument("--minutes", type=float, default=60, help="cases that have not begun by then are skipped")
    parser.add_argument("--out", type=Path, default=Path("bench/out/gpu"), help="where logs and outcomes.json go")
    parser.add_argument("--json", action="store_true", help="print a JSON object in place of the table")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    logs = options.out.resolve() / "logs"
    if options.worker:
        return serve_cases(device, logs)
    cases = list_cases(options.only, whole=options.all)
    if not cases:
        parser.error(f"--only {options.only!r} names no case; --list prints them")
    if options.list:
        print("\n".join(cases))
        return 0
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "this host has no usable GPU; --device cpu tries the program itself\n")
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", options.device]
    command += ["--out", str(options.out.resolve())]
    report = Report(cases, device)
    end = time.monotonic() + 60 * options.minutes
    outcomes = run_cases(command, cases, jobs=options.jobs, limit_of=limit_of, end=end, on_outcome=report.add_outcome)
    assert len(outcomes) == len(cases)
    (options.out / "outcomes.json").write_text(report.to_json())
    print(report.to_json() if options.json else report.table(), flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
