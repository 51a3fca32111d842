"""The two engines that bench/engine.py compares: transformers' own model and cache, and our engine in this process.

Each offers the same two measurements over the same checkpoint: seconds per decode step of a batch, and seconds of a
prefill.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from coatcheck.bench.setup.cpu_engine import layout_of, load_cpu_model, make_cpu_engine
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest

_NUM_BLOCKS, _MAX_SEQS, _BATCH_TOKENS = 1024, 32, 2048


class Contestant(Protocol):
    """One implementation that runs the checkpoint."""

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` greedy decode steps over all prompts at once, after their prefill."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from the prompt to its first token."""


class Transformers:
    """The model as transformers runs it: its attention, its cache, logits of the last position alone."""

    def __init__(self, checkpoint: Path, **options: str) -> None:
        """`options`: of from_pretrained, such as experts_implementation."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **options).eval()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[float]:
        cache = DynamicCache(config=self._model.config)
        tokens = self._step(torch.tensor(prompts), cache)
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            tokens = self._step(tokens, cache)
            seconds.append(time.perf_counter() - started)
        return seconds

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        self._step(torch.tensor([prompt]), DynamicCache(config=self._model.config)).tolist()
        return time.perf_counter() - started

    def _step(self, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """int64 [B, T] -> int64 [B, 1], the likeliest next token of each row."""
        logits = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        next_ids: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return next_ids


class Coatcheck:
    """Our engine, scheduler, pool and sampler included, without Ray and without gRPC."""

    def __init__(self, checkpoint: Path, quantization: str = "auto") -> None:
        model = load_cpu_model(checkpoint, quantization)
        self.weight_bytes = model.spec.weight_bytes
        self.kv_bytes_per_token = layout_of(model).bytes_per_token
        self._requests = 0
        self._engine = make_cpu_engine(
            model, num_blocks=_NUM_BLOCKS, max_num_seqs=_MAX_SEQS, max_batch_tokens=_BATCH_TOKENS
        )

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[float]:
        for prompt in prompts:
            self._submit(prompt, steps + 32)
        # All sequences decode once a step computes no prompt token. The first such step is not counted.
        while (out := self._engine.step()).num_prefill_tokens or out.num_decodes < len(prompts):
            pass
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            out = self._engine.step()
            seconds.append(time.perf_counter() - started)
            if out.num_decodes != len(prompts):
                raise RuntimeError(f"a step decoded {out.num_decodes} of {len(prompts)} sequences")
        self._drain()
        return seconds

    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        self._submit(prompt, 1)
        while not self._engine.step().outputs:
            pass
        seconds = time.perf_counter() - started
        self._drain()
        return seconds

    def _submit(self, prompt: Sequence[int], output_len: int) -> None:
        self._requests += 1
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=0)
        # A salt of its own keeps every prompt out of the prefix cache.
        name = str(self._requests)
        self._engine.submit_request(EngineRequest(name, tuple(prompt), sampling, cache_salt=name))

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()
