"""Inter-token latency of running chats with and without a very long prompt beside them.

    python bench/engine_cases/long_prompt.py [--prompt-len 100000] [--json bench/results/long_prompt.json]

A small llama with random weights (attention over a long context outweighs its linears early, which is the hard case).
Chats decode alone for a while, then the prompt arrives and is computed in chunks beside them; every chat gets a token
at every step, so a step's duration is every chat's inter-token latency. In process: no server, no network.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from coatcheck.bench.setup.cpu_engine import BLOCK_SIZE, load_cpu_model, make_cpu_engine, timed_step
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine

_CHAT_PROMPT = 64


def main(
    prompt_len: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 100_000,
    chats: Annotated[int, typer.Option(help="Sequences that decode all the while.")] = 8,
    alone_steps: Annotated[int, typer.Option(help="Steps measured before the prompt comes.")] = 400,
    max_batch_tokens: Annotated[int, typer.Option(help="The step's token budget.")] = 512,
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure inter-token latency beside a long prompt."""
    torch.set_num_threads(threads)
    with TemporaryDirectory() as scratch:
        engine = build(Path(scratch), prompt_len, chats, max_batch_tokens)
    for chat in range(chats):
        submit(engine, f"chat {chat}", _CHAT_PROMPT, max_tokens=60_000)
    while engine.scheduler.waiting or any(s.num_unscheduled > 1 for s in engine.scheduler.running):
        engine.step()
    alone = [timed_step(engine) for _ in range(alone_steps)]
    submit(engine, "long", prompt_len, max_tokens=1)
    beside = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("long prompt", total=prompt_len)
        while engine.stats().running > chats or engine.stats().waiting:
            beside.append(timed_step(engine))
            long = [s for s in engine.scheduler.running if s.prompt_len == prompt_len]
            progress.update(bar, completed=long[0].num_computed if long else prompt_len)
    rows = {"without the prompt": summary(alone), f"beside {prompt_len:,} tokens": summary(beside)}
    table = Table("chats' ITL", "steps", "p50 ms", "p90 ms", "p99 ms", "largest ms", "prompt done in s")
    for what, row in rows.items():
        took = f"{sum(beside):.1f}" if what.startswith("beside") else ""
        table.add_row(what, str(row["steps"]), *(f"{row[k]:.1f}" for k in ("p50", "p90", "p99", "max")), took)
    Console().print(table)
    facts: dict[str, Any] = dict(describe_machine(), max_batch_tokens=max_batch_tokens, chats=chats, rows=rows)
    write_results(json_path, dict(facts, prompt_seconds=sum(beside)))


def build(directory: Path, prompt_len: int, chats: int, max_batch_tokens: int) -> Engine:
    """An engine with room for the prompt and the chats."""
    torch.manual_seed(0)
    length = prompt_len + 64_000
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=4096,
        max_position_embeddings=length,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    num_blocks = (prompt_len + chats * 20_000) // BLOCK_SIZE
    return make_cpu_engine(
        load_cpu_model(directory), num_blocks=num_blocks, max_num_seqs=chats + 1, max_batch_tokens=max_batch_tokens
    )


def submit(engine: Engine, name: str, prompt_len: int, max_tokens: int) -> None:
    """Submit a request with a random prompt of its own."""
    prompt = torch.randint(3, 4096, (prompt_len,)).tolist()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    engine.submit_request(EngineRequest(name, tuple(prompt), sampling))


def summary(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    p50, p90, p99 = (cuts[p - 1] * 1e3 for p in (50, 90, 99))
    return {"steps": len(seconds), "p50": p50, "p90": p90, "p99": p99, "max": max(seconds) * 1e3}


if __name__ == "__main__":
    typer.run(main)
