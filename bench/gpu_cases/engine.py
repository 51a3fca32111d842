"""The engine end to end for bench/gpu.py: random weights in known shapes, without Ray and without gRPC."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from coatcheck.bench.gpu_cases.clock import Roofs
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.block_copier import make_copier
from coatcheck.workers.runner.graph_shapes import GraphSizes, capture_sizes
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner

BLOCK = 16
# By request id: token ids and log-probabilities.
Outputs = dict[str, tuple[list[int], list[float]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model configuration, and the transformers class `make` that builds it."""

    name: str
    config: Any
    make: Any


def shapes(*, quick: bool) -> list[Shape]:
    """A 0.6B with heads of 128 and q and k norms, and a 1B with heads of 64."""
    if quick:
        return [Shape("tiny", tiny_config(), LlamaForCausalLM)]
    common: dict[str, Any] = dict(
        max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2
    )
    small = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        **common,
    )
    large = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        **common,
    )
    return [Shape("0.6B", small, Qwen3ForCausalLM), Shape("1B", large, LlamaForCausalLM)]


def tiny_config() -> LlamaConfig:
    """The model of the runs whose tokens are compared in float32."""
    return LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=512,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def write_checkpoint(directory: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Path:
    """Random weights, larger than usual, so that greedy output does not repeat one token."""
    path = directory / shape.name
    if not path.exists():
        torch.manual_seed(0)
        with torch.device(device):
            model = shape.make(shape.config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.08)
        model.cpu().save_pretrained(path)
    return path


class Group:
    """A model, a pool and a runner on one rank, and engines over them."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        kv_dtype: str = "auto",
        host_blocks: int = 0,
        graphs: bool = True,
        communicator: Communicator | None = None,
    ) -> None:
        self.model, self.device, self.num_blocks, self.host_blocks = model, device, num_blocks, host_blocks
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.layout = BlockLayout.of(model.spec.layers, BLOCK, choose_kv_dtype(kv_dtype, model.spec.dtype))
        pool = allocate_kv_pool(self.layout, num_blocks, device)
        host = allocate_host_pool(host_blocks, self.layout.bytes_per_block, device) if host_blocks else None
        has_graphs = graphs and model.supports_cuda_graphs
        sizes = capture_sizes(max_num_seqs, 8192, 2048) if has_graphs else GraphSizes()
        self.runner = ModelRunner(
            model,
            self.layout,
            pool,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            graph_sizes=sizes,
            copier=None if host is None else make_copier(pool, host, communicator or Communicator()),
        )
        self.runner.warm_up()

    def engine(self, *, runner: Any = None, budget: int = 8192, num_blocks: int | None = None) -> Engine:
        """A new engine, with an empty prefix cache."""
        return Engine(
            self.model.spec,
            runner or self.runner,
            num_blocks=num_blocks or self.num_blocks,
            host_blocks=self.host_blocks,
            block_size=BLOCK,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=budget,
            max_model_len=self.max_model_len,
            pipeline_depth=1 if self.device.type == "cuda" else 0,
        )


def serve(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, salt: str = "") -> Outputs:
    """Run all prompts to their ends. The request id of a prompt is its index."""
    served: Outputs = {}
    for index, prompt in enumerate(prompts):
        served[str(index)] = ([], [])
        engine.submit_request(EngineRequest(str(index), tuple(prompt), sampling, cache_salt=salt))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = served[output.request_id]
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs]
    return served


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    """`count` random prompts of `length` tokens, the same at every call."""
    generator = torch.Generator().manual_seed(count + length)
    found: list[list[int]] = torch.randint(3, vocab, (count, length), generator=generator).tolist()
    return found


def engine(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Decode steps of 64 sequences at 2k, with graphs and without, over bf16 and fp8 pools; prefill; late kernels."""
    batch, context, steps = (4, 48, 6) if quick else (64, 2048, 48)
    with TemporaryDirectory() as scratch:
        for shape in shapes(quick=quick):
            path = write_checkpoint(Path(scratch), shape, torch.bfloat16, device)
            model = load_model(path, communicator=Communicator(), dtype="bfloat16", device=device)
            for kv, graphs in (("auto", True), ("auto", False), ("fp8", True)):
                watch = CompileWatch()
                watch.start()
                started = time.perf_counter()
                group = _make_group(model, device, batch, context, steps, kv_dtype=kv, graphs=graphs)
                watch.mark_ready()
                warm = time.perf_counter() - started
                prefill, step = measure_steps(group, batch, context, steps)
                weights = model.spec.weight_bytes
                roof = (weights + batch * context * group.layout.bytes_per_token) / roofs.memory
                what = f"{shape.name}, batch {batch}, context {context}, kv {kv}, graphs {'on' if graphs else 'off'}"
                share = roof / step
                judged = graphs and shape.name == "1B" and kv == "auto"
                yield Measurement(
                    "engine",
                    f"decode step, {what}",
                    step * 1e3,
                    share,
                    target="share >= 75%" if judged else "",
                    met=share >= 0.75 if judged else None,
                    note=f"warm in {warm:.0f} s",
                )
                floor = 2 * weights / 2 * batch * context / roofs.matrix
                yield Measurement("engine", f"prefill, {what}", prefill * 1e3, floor / prefill)
                yield Measurement(
                    "engine",
                    f"kernels compiled while serving, {what}",
                    error=watch.num_late(),
                    target="0",
                    met=watch.num_late() == 0,
                    note="; ".join(watch.kernels[-watch.num_late() :])[:500] if watch.num_late() else "",
                )
                watch.stop()
                del group
            yield _graphs_change_nothing(model, device, shape.name, quick)
            del model


def _max_tokens(batch: int, context: int, steps: int) -> int:
    """max_tokens of each sequence: tokens during the prefills of others, then those of the measured steps."""
    return steps + 16 + 2 * -(-batch * context // 8192)


def _make_group(model: Model, device: torch.device, batch: int, context: int, steps: int, **options: Any) -> Group:
    """A group with room for `measure_steps`."""
    longest = context + _max_tokens(batch, context, steps) + 1
    blocks = batch * (-(-longest // BLOCK) + 1)
    return Group(model, device, num_blocks=blocks, max_num_seqs=batch, max_model_len=longest, **options)


def measure_steps(group: Group, batch: int, context: int, steps: int) -> tuple[float, float]:
    """(wall seconds of the prefill of all sequences, wall seconds of one decode step of all)."""
    engine = group.engine(budget=min(8192, batch * context))
    length = context - steps // 2
    sampling = SamplingParams(max_tokens=_max_tokens(batch, context, steps), temperature=0.0, ignore_eos=True, seed=0)
    for round_ in ("warm", "measured"):
        started = time.perf_counter()
        for index, prompt in enumerate(prompts_of(batch, length, group.model.spec.vocab_size)):
            engine.submit_request(
                EngineRequest(f"{round_} {index}", tuple(prompt), sampling, cache_salt=f"{round_} {index}")
            )
        while engine.step().num_decodes < batch:
            pass
        prefill = time.perf_counter() - started
        for _ in range(4):
            engine.step()
        started = time.perf_counter()
        for _ in range(steps):
            if (decoded := engine.step().num_decodes) != batch:
                raise RuntimeError(f"a step decoded {decoded} of {batch} sequences")
        step = (time.perf_counter() - started) / steps
        while engine.has_work:
            engine.step()
    return prefill, step


def _graphs_change_nothing(model: Model, device: torch.device, name: str, quick: bool) -> Measurement:
    """The share of tokens that differ between runs with and without graphs. Rounding alone may change a few."""
    prompts = prompts_of(5, 20 if quick else 300, model.spec.vocab_size)
    sampling = SamplingParams(max_tokens=8 if quick else 32, temperature=0.0, ignore_eos=True, seed=0)
    make = partial(Group, model, device, num_blocks=5 * 24 + 8, max_num_seqs=8, max_model_len=368)
    served = [serve(make(graphs=graphs).engine(), prompts, sampling) for graphs in (True, False)]
    pairs = [pair for key in served[0] for pair in zip(served[0][key][0], served[1][key][0], strict=True)]
    differ = sum(one != other for one, other in pairs) / len(pairs)
    return Measurement(
        "engine",
        f"{name}: tokens with graphs unlike those without",
        error=differ,
        target="error <= 0.2",
        met=differ <= 0.2,
        note="bf16: padding picks other kernels of cuBLAS",
    )


def deterministic(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """--deterministic: equal bits of tokens and logprobs alone, in a batch, in chunks and cached; cost of a step."""
    batch, context, steps = (4, 48, 6) if quick else (64, 2048, 32)
    shape = shapes(quick=quick)[0]
    with TemporaryDirectory() as scratch:
        path = write_checkpoint(Path(scratch), shape, torch.bfloat16, device)
        costs = []
        for is_on in (False, True):
            if is_on and device.type == "cpu":
                return  # tests cover the CPU
            model = load_model(path, communicator=Communicator(), dtype="bfloat16", device=device, deterministic=is_on)
            group = _make_group(model, device, batch, context, steps)
            prefill, step = measure_steps(group, batch, context, steps)
            costs.append((prefill, step))
            mode = "on" if is_on else "off"
            yield Measurement(
                "deterministic",
                f"decode step, {shape.name}, batch {batch}, {mode}",
                step * 1e3,
                beside="off" if is_on else "",
                beside_ms=costs[0][1] * 1e3 if is_on else None,
            )
            yield Measurement(
                "deterministic",
                f"prefill, {shape.name}, {mode}",
                prefill * 1e3,
                beside="off" if is_on else "",
                beside_ms=costs[0][0] * 1e3 if is_on else None,
            )
        shortest, more = (20, 5) if quick else (150, 61)
        prompts = [all_[: shortest + more * i] for i, all_ in enumerate(prompts_of(6, 600, model.spec.vocab_size))]
        sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=9, ignore_eos=True, logprobs=0)
        cold = {str(i): serve(group.engine(), [prompt], sampling)["0"] for i, prompt in enumerate(prompts)}
        ways = {
            "in a batch": serve(group.engine(), prompts, sampling),
            "in chunks of 97": serve(group.engine(budget=97), prompts, sampling),
        }
        cached = group.engine(budget=700)  # the last: all engines write to one pool
        serve(cached, prompts, sampling, "salt")
        ways["cached"] = serve(cached, prompts, sampling, "salt")
        for way, outputs in ways.items():
            unlike = sum(outputs[key] != cold[key] for key in cold)
            yield Measurement(
                "deterministic",
                f"requests whose output differs {way} from alone",
                error=unlike,
                target="0",
                met=unlike == 0,
            )
