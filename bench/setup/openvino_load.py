"""The load of one scenario on OpenVINO's continuous batching, in this process. OpenvinoPipeline (peers.py) runs this
file with the interpreter of an environment that has `openvino-genai`; it imports nothing of this project.

    python openvino_load.py MODEL SCENARIO SEED

MODEL is a checkpoint that `optimum-cli export openvino` has written. SCENARIO is a JSON object with the fields of
bench/setup/scenario.py. Prints one JSON object: the medians of TTFT and TPOT in milliseconds, and tokens per second.
"""

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

VOCABULARY = 8192
BATCHED_TOKENS = 512
CACHE_GB = 2


@dataclass(eq=False)
class OpenvinoStream:
    """A request under way. Times are those of time.perf_counter()."""

    handle: Any
    began: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def read(self) -> bool:
        """Count the tokens that have come; returns whether the request has ended."""
        now = time.perf_counter()
        while self.handle.can_read():
            for output in self.handle.read().values():
                count = len(output.generated_ids)
                if count:
                    self.first = self.first or now
                    self.last = now
                    self.tokens += count
        return bool(self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING)


def prompts(scenario: dict[str, int], seed: int) -> list[list[int]]:
    """Random tokens, behind one of the shared prefixes if the scenario has them."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, VOCABULARY) for _ in range(count)]

    prefixes = [tokens(scenario["prefix_len"]) for _ in range(scenario["prefixes"])] or [[]]
    return [prefixes[i % len(prefixes)] + tokens(scenario["input_len"]) for i in range(scenario["requests"])]


def run(pipeline: Any, scenario: dict[str, int], seed: int) -> dict[str, float]:
    """Keep `clients` requests running until all are answered."""
    config = openvino_genai.GenerationConfig(max_new_tokens=scenario["output_len"], ignore_eos=True, do_sample=False)
    waiting = list(enumerate(prompts(scenario, seed)))[::-1]
    running: list[OpenvinoStream] = []
    ended: list[OpenvinoStream] = []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < scenario["clients"]:
            number, prompt = waiting.pop()
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            running.append(OpenvinoStream(pipeline.add_request(number, ids, config), time.perf_counter()))
        pipeline.step()
        done = [stream for stream in running if stream.read()]
        ended += done
        running = [stream for stream in running if stream not in done]
    seconds = time.perf_counter() - began
    if any(stream.tokens != scenario["output_len"] for stream in ended):
        raise SystemExit(f"answers have {[stream.tokens for stream in ended]} tokens")
    return {
        "ttft_ms": statistics.median(stream.first - stream.began for stream in ended) * 1e3,
        "tpot_ms": statistics.median((stream.last - stream.first) / (stream.tokens - 1) for stream in ended) * 1e3,
        "tokens_per_second": sum(stream.tokens for stream in ended) / seconds,
    }


def main() -> None:
    """Run the scenario once, after one request that is not measured."""
    model, scenario, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    run(pipeline, {"clients": 1, "requests": 1, "input_len": 16, "output_len": 4, "prefixes": 0, "prefix_len": 0}, -1)
    print(json.dumps(run(pipeline, scenario, seed)))


if __name__ == "__main__":
    main()
