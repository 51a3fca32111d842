"""A public load generator, unmodified, against both of OpenAI's endpoints: `vllm bench serve`, as its users run it.

    python bench/router_cases/load_generator.py PATH_OF_ITS_VENV [--prompts 64] [--concurrency 8]

It reads our streams with its own parser, counts with its own tokenizer, and fails when one request fails. The model is
the demo's, so its figures show compatibility, not speed.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from coatcheck.bench.setup.results_file import describe_machine
from coatcheck.bench.setup.servers import CoatcheckServer

DEMO = Path(__file__).parents[2] / "demo" / "model"
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main(
    environment: Annotated[Path, typer.Argument(help="A virtual environment in which vllm is installed.")],
    prompts: Annotated[int, typer.Option(min=1, help="Requests to each endpoint.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
) -> None:
    """Run `vllm bench serve` against our server."""
    print(describe_machine())
    with TemporaryDirectory() as scratch, CoatcheckServer(DEMO, Path(scratch)) as server:
        assert isinstance(server, CoatcheckServer)
        for backend, path in ENDPOINTS.items():
            report = generate(environment, server.http_address, backend, path, prompts, concurrency, Path(scratch))
            print(
                f"{path:22} {report['completed']} of {prompts} answered, {report['failed']} failed, "
                f"{report['total_output_tokens']} tokens; median TTFT {report['median_ttft_ms']:.1f} ms, "
                f"TPOT {report['median_tpot_ms']:.2f} ms"
            )
            if report["completed"] != prompts or report["total_output_tokens"] != prompts * 32:
                raise SystemExit(f"{path}: not every request was answered in full")


def generate(
    environment: Path, address: str, backend: str, path: str, prompts: int, concurrency: int, scratch: Path
) -> dict[str, Any]:
    """Run it once; return its report."""
    command: list[str | Path] = [environment / "bin" / "vllm", "bench", "serve", "--backend", backend]
    command += ["--base-url", f"http://{address}", "--endpoint", path, "--model", "model", "--tokenizer", DEMO]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32", "--ignore-eos"]
    command += f"--num-prompts {prompts} --max-concurrency {concurrency} --save-result".split()
    command += ["--result-dir", scratch, "--result-filename", "report.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vllm bench serve ended with {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads((scratch / "report.json").read_text())
    return report


if __name__ == "__main__":
    typer.run(main)
