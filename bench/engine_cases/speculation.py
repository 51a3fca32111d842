"""Tokens a second with speculative decoding, compared with the same requests without.

    python bench/engine_cases/speculation.py [--draft-tokens 4] [--json bench/results/speculation.json]

Runs alternate between the two in one process. Four kinds of text, because what guesses save depends on the text
alone (the model has random weights):

    repeats   greedy: the model soon repeats itself, and nearly every guess is right
    schema    objects of a JSON schema: the grammar forces about half of the tokens
    chance    drawn from 16 tokens: short matches everywhere, and a guess is right one time in 16
    new       drawn from the whole vocabulary: hardly a match

The last two show what speculation costs where it cannot help. The tokens of both sides must be equal.
"""

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.cpu_engine import load_cpu_model, make_cpu_engine
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.model.model import Model
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_PROMPT: Final = 256
_ENTRY: Final = {
    "name": {"type": "string", "maxLength": 16},
    "category": {"enum": ["function", "module", "class"]},
    "is_public": {"type": "boolean"},
    "description": {"type": "string", "minLength": 20, "maxLength": 60},
}
_OBJECT: Final = {"type": "object", "properties": _ENTRY, "required": list(_ENTRY), "additionalProperties": False}
_SCHEMA: Final = {"type": "array", "items": _OBJECT, "minItems": 4}
_TEXTS: Final[dict[str, dict[str, Any]]] = {
    "repeats": dict(temperature=0.0),
    "schema": dict(temperature=1.0, structured=Grammar("json_schema", json.dumps(_SCHEMA))),
    "chance": dict(temperature=1.0, allowed_token_ids=tuple(range(100, 116))),
    "new": dict(temperature=1.0),
}


def main(
    draft_tokens: Annotated[int, typer.Option(help="--speculative-tokens of the one side.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 192,
    rounds: Annotated[int, typer.Option(help="Pairs of runs for each row.")] = 6,
    checkpoint: Annotated[Path | None, typer.Option(help="Another checkpoint than the 82M llama.")] = None,
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure speculative decoding by prompt lookup."""
    torch.set_num_threads(threads)
    with TemporaryDirectory() as scratch:
        model = load_cpu_model(checkpoint or make_checkpoint(Path(scratch) / "llama"))
    cases = [(text, batch) for text in _TEXTS for batch in (1, 4, 16)]
    rows: list[dict[str, Any]] = []
    for text, batch in track(cases, "measuring", console=Console(stderr=True)):
        pairs = [measure_pair(model, text, batch, tokens, draft_tokens, number % 2 == 0) for number in range(rounds)]
        ratios = sorted(pair["ratio"] for pair in pairs)
        rows.append({
            "text": text, "batch": batch, "ratio": statistics.median(ratios), "lowest": ratios[0],
            "highest": ratios[-1], "drafted": pairs[-1]["drafted"], "accepted": pairs[-1]["accepted"],
            "tokens": pairs[-1]["tokens"],
        })  # fmt: skip
    table = Table("text", "sequences", "times as fast", "lowest to highest", "guesses for each token", "right")
    for row in rows:
        right = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        table.add_row(
            row["text"], str(row["batch"]), f"{row['ratio']:.2f}", f"{row['lowest']:.2f} to {row['highest']:.2f}",
            f"{row['drafted'] / row['tokens']:.2f}", right,
        )  # fmt: skip
    Console().print(table)
    write_results(json_path, dict(describe_machine(), draft_tokens=draft_tokens, tokens=tokens, rows=rows))


def measure_pair(
    model: Model, text: str, batch: int, tokens: int, draft_tokens: int, is_plain_first: bool
) -> dict[str, float]:
    """A run without guesses and one with. The order alternates, because the second run is often a little slower."""
    order = (0, draft_tokens) if is_plain_first else (draft_tokens, 0)
    runs = {most: run(model, text, batch, tokens, most) for most in order}
    (plain_tokens, plain_seconds, _, _), (drafted_tokens, seconds, drafted, accepted) = runs[0], runs[draft_tokens]
    if drafted_tokens != plain_tokens:
        raise RuntimeError(f"speculation changed a token ({text}, {batch} sequences)")
    return {
        "ratio": plain_seconds / seconds, "drafted": drafted, "accepted": accepted,
        "tokens": sum(map(len, plain_tokens.values())),
    }  # fmt: skip


def run(
    model: Model, text: str, batch: int, tokens: int, draft_tokens: int
) -> tuple[dict[str, list[int]], float, int, int]:
    """(tokens of each request, seconds of all steps after the prompts, guesses, right guesses)."""
    grammars = None
    if "structured" in _TEXTS[text]:
        vocab = model.spec.vocab_size
        grammars = GrammarBackend.load(model.directory, vocab_size=vocab, eos_token_ids=model.spec.eos_token_ids)
    engine = make_cpu_engine(
        model, num_blocks=batch * (_PROMPT + tokens) // 16 + 64, max_num_seqs=64, max_draft_tokens=draft_tokens,
        grammars=grammars,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    said: dict[str, list[int]] = {}
    for index in range(batch):
        prompt = torch.randint(116, VOCABULARY, (_PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=tokens, seed=index, ignore_eos=grammars is None, **_TEXTS[text])
        engine.submit_request(EngineRequest(str(index), tuple(prompt), sampling))
        said[str(index)] = []
    started = 0.0
    while engine.has_work:
        for output in engine.step().outputs:
            said[output.request_id] += output.token_ids
        if not started and all(said.values()):
            started = time.perf_counter()
    seconds, stats = time.perf_counter() - started, engine.stats()
    return said, seconds, stats.draft_tokens, stats.accepted_draft_tokens


if __name__ == "__main__":
    typer.run(main)
