"""Engines over a tiny random llama with a tokenizer, for structured output."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_CACHED_GRAMMARS
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model
from tests.workers.checkpoints import tiny_checkpoint

EOS = 0
PROMPT = tuple((i * 37 + 11) % 550 + 3 for i in range(30))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
LARGE = Grammar("json_schema", json.dumps({"properties": {f"a{n}": {"type": "null"} for n in range(400)}}))
OTHER = Grammar("regex", "[a-z ]{40,50}")
Make = Callable[..., Engine]


@dataclass(frozen=True)
class OffTheWire:
    """A runner that encodes and decodes each plan, as for other ranks. `sent`: the encoded plans."""

    runner: ModelRunner
    sent: list[bytes]

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Launch the decoded plan."""
        ints = plan.encode()
        self.sent.append(ints.tobytes())
        return self.runner.launch(StepPlan.decode(ints))


def params(grammar: Grammar | None, **changes: Any) -> SamplingParams:
    """Sampling with temperature 1, so that every mask matters."""
    return SamplingParams(**{**dict(max_tokens=60, seed=5, temperature=1.0, structured=grammar), **changes})


def write_checkpoint(directory: Path) -> Path:
    """Write the model and its tokenizer."""
    return write_model(tiny_checkpoint("llama", directory, vocab_size=600, eos_token_id=EOS, pad_token_id=3))


def load_alone(checkpoint: Path) -> Model:
    """Load the model on one rank."""
    return load_model(checkpoint, communicator=Communicator(), device="cpu")


def engines_of(model: Model) -> Make:
    """A factory of engines over `model`, each with its own pool."""

    def make_engine(
        num_blocks: int = 200,
        depth: int = 0,
        kind: type[GrammarBackend] = GrammarBackend,
        grammars_kept: int = MAX_CACHED_GRAMMARS,
        sent: list[bytes] | None = None,
        drafts: int = 0,
    ) -> Engine:
        ticks = count()  # all steps take equally long, so that rows of drafts are free

        layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
        pool = allocate_kv_pool(layout, num_blocks, torch.device("cpu"))
        grammars = kind.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
        runner = ModelRunner(
            model, layout, pool, max_num_seqs=16, max_model_len=256, grammars=grammars, finds_forced_tokens=drafts > 0
        )
        return Engine(
            model.spec, OffTheWire(runner, [] if sent is None else sent), num_blocks=num_blocks, block_size=8,
            pipeline_depth=depth, max_num_seqs=16, grammars=grammars, grammars_kept=grammars_kept,
            max_draft_tokens=drafts, clock=lambda: float(next(ticks)),
        )  # fmt: skip

    return make_engine


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    """Run the requests to their end. Returns the tokens of each choice, by "id.choice"."""
    said: dict[str, list[int]] = {}
    for request in requests:
        engine.submit_request(request)
    while engine.has_work:
        output = engine.step()
        assert not output.refused
        for part in output.outputs:
            said.setdefault(f"{part.request_id}.{part.choice}", []).extend(part.token_ids)
        engine.check()
    return said


def text_of(token_ids: list[int]) -> str:
    """The text of the tokens, without the end token."""
    text: str = byte_level_tokenizer().decode(token_ids, skip_special_tokens=True)
    return text
