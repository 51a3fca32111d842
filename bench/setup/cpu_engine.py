"""An engine in this process on CPU, without Ray and gRPC, for benchmarks of single steps."""

import time
from pathlib import Path

import torch

from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.block_copier import make_copier
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.structured.grammar_backend import GrammarBackend

BLOCK_SIZE = 16


def load_cpu_model(checkpoint: Path, quantization: str = "auto") -> Model:
    """The model in bfloat16, on one rank."""
    return load_model(
        checkpoint, communicator=Communicator(), dtype="bfloat16", device="cpu", quantization=quantization
    )


def layout_of(model: Model) -> BlockLayout:
    """Blocks of BLOCK_SIZE tokens in bfloat16."""
    return BlockLayout.of(model.spec.layers, BLOCK_SIZE, KvDtype.BFLOAT16)


def make_cpu_engine(
    model: Model,
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_batch_tokens: int = 512,
    host_blocks: int = 0,
    max_draft_tokens: int = 0,
    grammars: GrammarBackend | None = None,
) -> Engine:
    """An engine with its own pool of `num_blocks` blocks, and a host tier if `host_blocks` is above 0."""
    layout, device = layout_of(model), torch.device("cpu")
    pool = allocate_kv_pool(layout, num_blocks, device)
    host = allocate_host_pool(host_blocks, layout.bytes_per_block, device) if host_blocks else None
    runner = ModelRunner(
        model,
        layout,
        pool,
        max_num_seqs=max_num_seqs,
        max_model_len=min(model.spec.max_model_len, num_blocks * BLOCK_SIZE),
        copier=None if host is None else make_copier(pool, host, Communicator()),
        grammars=grammars,
        finds_forced_tokens=max_draft_tokens > 0,
    )
    return Engine(
        model.spec,
        runner,
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_draft_tokens=max_draft_tokens,
        grammars=grammars,
    )


def timed_step(engine: Engine) -> float:
    """Seconds of one step."""
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started
