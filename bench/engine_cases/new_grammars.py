"""Inter-token latency of running chats while requests with large new schemas arrive.

    python bench/engine_cases/new_grammars.py [--schemas 20] [--properties 500]

The 82M checkpoint of bench/engine.py. Chats decode alone for a while; then a request with a new schema arrives every
`--every` steps. Every chat gets a token at every step, so a step's duration, with the submission before it, is every
chat's inter-token latency. At the end one tenant submits `--schemas` schemas at once, another tenant submits a small
grammar, and the time to its first token is measured. In process: no server.
"""

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.cpu_engine import load_cpu_model, make_cpu_engine, timed_step
from coatcheck.bench.setup.results_file import describe_machine
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_BLOCKS, _ALONE_STEPS = 2000, 200


def main(
    schemas: Annotated[int, typer.Option(min=1, help="Schemas, one after another.")] = 20,
    properties: Annotated[int, typer.Option(min=1, help="Optional properties of each.")] = 500,
    chats: Annotated[int, typer.Option(min=1, help="Sequences that decode all the while.")] = 8,
    every: Annotated[int, typer.Option(min=1, help="Steps from one schema to the next.")] = 20,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
) -> None:
    """Measure inter-token latency beside new schemas."""
    with TemporaryDirectory() as scratch:
        engine = build(make_checkpoint((checkpoint or Path(scratch) / "llama-82m").resolve()), chats)
    for chat in range(chats):
        submit(engine, f"chat {chat}", None, max_tokens=3000)
    while engine.scheduler.waiting or any(sequence.num_unscheduled > 1 for sequence in engine.scheduler.running):
        engine.step()
    alone = [timed_step(engine) for _ in range(_ALONE_STEPS)]
    beside, asked, waits = list[float](), dict[str, float](), list[float]()
    for number in range(schemas * every):
        began = time.perf_counter()
        if number % every == 0:
            asked[name := f"schema {number}"] = began
            submit(engine, name, large(f"field_{number}", properties), max_tokens=4)
        output = engine.step()
        beside.append(time.perf_counter() - began)
        for part in output.outputs:
            if part.request_id in asked:
                waits.append(time.perf_counter() - asked.pop(part.request_id))
    print(describe_machine())
    print(f"{chats} chats; a schema of {properties} optional properties every {every} steps")
    for what, seconds in (("alone", alone), ("beside new schemas", beside)):
        cuts = statistics.quantiles(seconds, n=100)
        middle, late, last = cuts[49] * 1e3, cuts[98] * 1e3, max(seconds) * 1e3
        print(f"{what:20} ITL p50 {middle:6.1f} ms   p99 {late:6.1f} ms   largest {last:6.1f} ms")
    print(f"first token of a schema's request after {statistics.median(waits) * 1e3:.0f} ms (median of {len(waits)})")
    while engine.stats().waiting:
        engine.step()
    behind = seconds_behind(engine, [large(f"another_{number}", properties) for number in range(schemas)])
    print(f"first token of a small grammar behind {schemas} schemas of another tenant: after {behind * 1e3:.0f} ms")


def build(directory: Path, chats: int) -> Engine:
    """An engine with room for the chats."""
    model = load_cpu_model(directory)
    spec = model.spec
    grammars = GrammarBackend.load(directory, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    return make_cpu_engine(model, num_blocks=_BLOCKS, max_num_seqs=chats + 8, grammars=grammars)


def large(prefix: str, properties: int) -> Grammar:
    """A JSON schema of `properties` optional properties."""
    named = {f"{prefix}_{place}": {"type": "string"} for place in range(properties)}
    return Grammar(
        "json_schema", json.dumps({"type": "object", "properties": named, "additionalProperties": False})
    )  # fmt: skip


def seconds_behind(engine: Engine, grammars: list[Grammar]) -> float:
    """Seconds to the first token of one tenant's small grammar after another tenant has submitted the large ones."""
    for number, grammar in enumerate(grammars):
        submit(engine, f"many {number}", grammar, max_tokens=4, tenant="many")
    engine.step()
    began = time.perf_counter()
    submit(engine, "one", Grammar("regex", "[a-z]{1,20}"), max_tokens=4, tenant="one")
    while not any(part.request_id == "one" for part in engine.step().outputs):
        pass
    return time.perf_counter() - began


def submit(engine: Engine, name: str, grammar: Grammar | None, max_tokens: int, tenant: str = "") -> None:
    """Submit a request with a short prompt of its own."""
    prompt = torch.randint(3, VOCABULARY, (32,)).tolist()
    free = grammar is None
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=free, structured=grammar)
    engine.submit_request(EngineRequest(name, tuple(prompt), sampling, tenant=tenant))


if __name__ == "__main__":
    typer.run(main)
