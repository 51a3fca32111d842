"""The engines that bench/serve.py measures beside ours, each as its users run it, with prefix caching.

vLLM is loaded by its own load generator, llama.cpp's server by streams of /v1/completions, OpenVINO in its process.
"""

import asyncio
import json
import os
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from coatcheck.bench.setup.checkpoint import VOCABULARY
from coatcheck.bench.setup.gguf_checkpoint import write_gguf
from coatcheck.bench.setup.scenario import Figures, Scenario
from coatcheck.bench.setup.servers import KV_GIB, BenchEngine, Server, free_port
from coatcheck.bench.setup.sse_load import run_sse
from coatcheck.cluster.benchmark.load_generator import Recording
from coatcheck.cluster.benchmark.request_generator import RequestGenerator

_LLAMA_SLOTS = 32  # sequences at once: the most clients of a scenario
_LLAMA_CONTEXT = 2048  # tokens of each


class _HttpServer(Server):
    """A server with an HTTP page that says whether it is ready. `_address`: its "host:port"."""

    _address: str

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class VllmServer(_HttpServer):
    """`vllm serve` from its virtual environment, loaded by `vllm bench serve`."""

    name = "vllm"

    def __init__(self, environment: Path, checkpoint: Path, scratch: Path) -> None:
        self._command, self._checkpoint, self._scratch = environment / "bin" / "vllm", checkpoint, scratch
        self._address = f"127.0.0.1:{free_port()}"
        flags = ["--host", "127.0.0.1", "--port", self._address.rpartition(":")[2], "--dtype", "bfloat16"]
        # The variables that vLLM's documentation asks to set for CPUs, and no telemetry. Left to itself vLLM keeps one
        # core for its front end, which on two cores is half of them.
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__([self._command, "serve", checkpoint, *flags], scratch / "vllm.log", settings)

    def run(self, scenario: Scenario, seed: int) -> Figures:
        url = f"http://{self._address}"
        command: list[str | Path] = [self._command, "bench", "serve", "--backend", "vllm", "--base-url", url]
        command += ["--model", self._checkpoint, "--ignore-eos", "--save-result", "--seed", str(seed)]
        command += ["--temperature", "0"]  # greedy, as our own load is
        command += ["--result-dir", self._scratch, "--result-filename", "vllm.json"]
        command += f"--num-prompts {scenario.requests} --max-concurrency {scenario.clients}".split()
        if scenario.prefixes:
            command += ["--dataset-name", "prefix_repetition"]
            command += f"--prefix-repetition-num-prefixes {scenario.prefixes}".split()
            command += f"--prefix-repetition-prefix-len {scenario.prefix_len}".split()
            command += f"--prefix-repetition-suffix-len {scenario.input_len}".split()
            command += f"--prefix-repetition-output-len {scenario.output_len}".split()
        else:
            command += f"--dataset-name random --random-input-len {scenario.input_len}".split()
            command += f"--random-output-len {scenario.output_len}".split()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        report = json.loads((self._scratch / "vllm.json").read_text())
        if report["completed"] != scenario.requests:
            raise RuntimeError(f"vllm answered {report['completed']} of {scenario.requests} requests")
        return Figures(report["median_ttft_ms"], report["median_tpot_ms"], report["output_throughput"])


class LlamaCppServer(_HttpServer):
    """llama.cpp's `llama-server` with continuous batching, over a GGUF file of the same weights in bfloat16."""

    name = "llama.cpp"

    def __init__(self, command: Path, checkpoint: Path, scratch: Path) -> None:
        model = write_gguf(checkpoint, scratch / "model.gguf", "bf16")
        self._address = f"127.0.0.1:{free_port()}"
        flags = f"--host 127.0.0.1 --port {self._address.rpartition(':')[2]} --parallel {_LLAMA_SLOTS}"
        flags += f" --ctx-size {_LLAMA_SLOTS * _LLAMA_CONTEXT} --cont-batching --ubatch-size 512 --no-webui"
        super().__init__([command, "--model", model, *flags.split()], scratch / "llama.log")

    def run(self, scenario: Scenario, seed: int) -> Figures:
        work = RequestGenerator(
            VOCABULARY,
            seed=seed,
            prompts="shared-prefix" if scenario.prefixes else "random",
            input_len=scenario.input_len,
            output_len=scenario.output_len,
            num_prefixes=max(1, scenario.prefixes),
            prefix_len=scenario.prefix_len,
        )
        requests = work.build_requests(scenario.requests)
        began = time.perf_counter()
        recordings = asyncio.run(run_sse(self._address, requests, scenario.clients))
        seconds = time.perf_counter() - began
        return _figures(recordings, scenario.output_len, seconds)


class OpenvinoPipeline(BenchEngine):
    """OpenVINO GenAI's continuous batching in a process of its own for each run; see openvino_load.py."""

    name = "openvino"

    def __init__(self, environment: Path, checkpoint: Path, scratch: Path) -> None:
        self._python, self._model = environment / "bin" / "python", scratch / "openvino"
        command: list[str | Path] = [environment / "bin" / "optimum-cli", "export", "openvino", "--model", checkpoint]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", self._model]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def stop(self) -> None:
        """Nothing runs between two scenarios."""

    def run(self, scenario: Scenario, seed: int) -> Figures:
        load = Path(__file__).with_name("openvino_load.py")
        command: Sequence[str | Path] = [self._python, load, self._model, json.dumps(asdict(scenario)), str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return Figures(**json.loads(done.stdout))


def _figures(recordings: Sequence[Recording], output_len: int, seconds: float) -> Figures:
    """The medians over streams that each have `output_len` tokens, in an answer to all that took `seconds`."""
    ttft, tpot = [], []
    for recording in recordings:
        # The first piece may have the head of the response alone.
        pairs = zip(recording.times, recording.messages, strict=True)
        times = [at for at, message in pairs if b"data: " in message]
        ttft.append(times[0] - recording.due)
        tpot.append((times[-1] - times[0]) / (output_len - 1))
    return Figures(statistics.median(ttft) * 1e3, statistics.median(tpot) * 1e3, output_len * len(recordings) / seconds)
