"""The engines that bench/serve.py measures beside ours, each as its users run it, with prefix caching.

Servers are loaded by streams of /v1/completions (sse_load.py), as ours is; OpenVINO runs in the process of its load.
"""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from coatcheck.bench.setup.gguf_checkpoint import write_gguf
from coatcheck.bench.setup.scenario import Figures, Scenario
from coatcheck.bench.setup.servers import KV_GIB, BenchEngine, OpenAiServer, free_port

_LLAMA_SLOTS = 32  # sequences at once: the most clients of a scenario
_LLAMA_CONTEXT = 2048  # tokens of each


class _PeerServer(OpenAiServer):
    """A server whose page /health says whether it is ready."""

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_address}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class VllmServer(_PeerServer):
    """`vllm serve` from its virtual environment."""

    name = "vllm"

    def __init__(self, environment: Path, checkpoint: Path, scratch: Path) -> None:
        self.http_address = f"127.0.0.1:{free_port()}"
        flags = ["--host", "127.0.0.1", "--port", self.http_address.rpartition(":")[2], "--dtype", "bfloat16"]
        # The variables that vLLM's documentation asks to set for CPUs, and no telemetry. Left to itself vLLM keeps one
        # core for its front end, which on two cores is half of them.
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = environment / "bin" / "vllm"
        super().__init__([command, "serve", checkpoint, *flags], scratch / "vllm.log", settings)


class LlamaCppServer(_PeerServer):
    """llama.cpp's `llama-server` with continuous batching, over a GGUF file of the same weights in bfloat16."""

    name = "llama.cpp"

    def __init__(self, command: Path, checkpoint: Path, scratch: Path) -> None:
        model = write_gguf(checkpoint, scratch / "model.gguf", "bf16")
        self.http_address = f"127.0.0.1:{free_port()}"
        flags = f"--host 127.0.0.1 --port {self.http_address.rpartition(':')[2]} --parallel {_LLAMA_SLOTS}"
        flags += f" --ctx-size {_LLAMA_SLOTS * _LLAMA_CONTEXT} --cont-batching --ubatch-size 512 --no-webui"
        super().__init__([command, "--model", model, *flags.split()], scratch / "llama.log")


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
