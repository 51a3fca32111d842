"""load_rank(): a rank's model, memory and runner, ready for the first request."""

import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch

from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.core.attention_selector import (
    LIBRARIES,
    NEVER_RUN,
    backend_name,
    check_backend_host,
    installed_libraries,
)
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.rank_progress import Phase
from coatcheck.workers.core.runner_protocol import CopyReport, Runner
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.host.free_memory import gpu_memory, host_free_bytes
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.model.model_rules import check_host_tier
from coatcheck.workers.runner.block_copier import make_copier, num_staging_blocks
from coatcheck.workers.runner.cuda_graphs import Progress
from coatcheck.workers.runner.graph_shapes import GraphSizes, capture_sizes, limit_graphs
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.memory_budget import MemoryBudget, check_weights_fit, free_gpu_bytes, subtract_states
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.warm_up import copy_warm_up_plans, largest_plans, warm_up_plans
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from coatcheck.workers.verification.verification import verify_once

_log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 64
_MEASURED_TOKENS = 256  # in the small KV pool of _measure_free_gpu_bytes


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """`spec`: its `name` is the name under which the model is served. `copy_report`: the report on the copies of the
    warm-up; None without a host tier."""

    spec: ModelSpec
    memory: MemoryBudget
    runner: ModelRunner
    grammars: GrammarBackend
    copy_report: CopyReport | None


def load_rank(
    config: GroupConfig,
    communicator: Communicator,
    device: torch.device,
    *,
    ranks_on_host: int,
    compile_watch: CompileWatch,
    update_progress: Callable[..., None] = lambda **changed: None,
) -> LoadedRank:
    """Load this rank's slices, allocate the KV pool and run the first steps. Every rank of a group calls it at once.

    `update_progress` gets the fields of RankProgress that change.
    Raises InvalidModel for a checkpoint that cannot be served, InvalidConfig for settings that do not fit the machine.
    """
    with advise_on_gpu_memory():
        return _load_rank(config, communicator, device, ranks_on_host, compile_watch, update_progress)


@contextmanager
def advise_on_gpu_memory() -> Iterator[None]:
    """Add what to change to torch's error for a GPU whose memory is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = " ".join(str(error).split("If reserved but unallocated")[0].split())
        raise torch.OutOfMemoryError(
            f"{line} Lower max-batch-tokens, max-num-seqs or max-cudagraph-capture-size, raise tp, use a quantised "
            "checkpoint, or stop other programs on the GPU"
        ) from error


def _load_rank(
    config: GroupConfig,
    communicator: Communicator,
    device: torch.device,
    ranks_on_host: int,
    compile_watch: CompileWatch,
    update_progress: Callable[..., None],
) -> LoadedRank:
    if not config.skip_verify:
        with Checkpoint.open(config.model) as checkpoint:
            verify_once(checkpoint.directory, config.max_model_len)
    check_attention_library(config, device)
    model = _load_model(config, communicator, device, ranks_on_host, update_progress)
    check_host_tier(model.spec.architecture, config.host_kv_memory, has_states=bool(model.spec.state_layers))
    communicator.barrier()
    update_progress(phase=Phase.WARMING)

    def show_captures(done: int, total: int) -> None:
        update_progress(captured_graphs=done, total_graphs=total)

    # Routers and block hashes use the name under which the model is served.
    spec = dataclasses.replace(model.spec, name=config.served_model_name)
    grammars = GrammarBackend.load(model.directory, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    if device.type == "cuda":
        compile_watch.start()
    layout = BlockLayout.of(spec.layers, config.block_size, choose_kv_dtype(config.kv_dtype, spec.dtype))
    free = (
        _measure_free_gpu_bytes(config, model, layout, communicator, device, show_captures)
        if device.type == "cuda"
        else subtract_states(config, host_free_bytes(), config.max_num_seqs * spec.state_bytes, ranks_on_host)
    )
    memory = MemoryBudget.allocate(
        config,
        layout,
        communicator,
        device,
        ranks_on_host=ranks_on_host,
        free_device_bytes=free,
        state_bytes=spec.state_bytes,
    )
    runner = _build_runner(config, model, memory, communicator, min(model.spec.max_model_len, memory.tokens), grammars)
    copy_report = _warm_up(config, runner, memory, show_captures)
    compile_watch.mark_ready()
    return LoadedRank(spec, memory, runner, grammars, copy_report)


def check_attention_library(config: GroupConfig, device: torch.device) -> None:
    """Import the library of the group's attention backend, if it has one, and log its use.

    Raises InvalidConfig if the backend cannot run on this host, or if the import fails.
    """
    kind = "cpu" if device.type == "cpu" else "cuda" if torch.version.hip is None else "hip"
    name = backend_name(config.attention_backend)
    check_backend_host(
        config.attention_backend,
        device=kind,
        capabilities=[torch.cuda.get_device_capability(device)] if kind == "cuda" else [],
        is_installed=name in installed_libraries(),
    )
    if name in LIBRARIES:
        try:
            import_module(LIBRARIES[name].module)
        except Exception as error:  # a broken installation may raise anything
            reason = str(error).partition("\n")[0]
            raise InvalidConfig(
                f"attention-backend {name} cannot be imported ({type(error).__name__}: {reason}); "
                f"{LIBRARIES[name].install}, or use --attention-backend triton"
            ) from None
        _log.warning("attention-backend %s is used instead of Coatcheck's kernels: %s", name, NEVER_RUN)


def build_engine(config: GroupConfig, loaded: LoadedRank, runner: Runner) -> Engine:
    """The engine over `runner`. On a GPU steps are pipelined one deep, because launches there are asynchronous, unless
    drafts need the tokens of the step before."""
    memory = loaded.memory
    drafts = config.speculative_tokens
    if drafts and loaded.spec.state_layers:
        _log.warning(
            "no speculative decoding: the recurrent states of %s cannot undo a rejected draft token", loaded.spec.name
        )
        drafts = 0
    engine = Engine(
        loaded.spec,
        runner,
        num_blocks=memory.num_blocks,
        host_blocks=memory.host_blocks,
        num_snapshots=memory.num_snapshots,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=config.max_model_len,
        eviction=config.eviction,
        pipeline_depth=1 if memory.pool.device.type == "cuda" and not drafts else 0,
        max_draft_tokens=drafts,
        grammars=loaded.grammars,
    )
    engine.update_copy_costs(loaded.copy_report)
    return engine


def _load_model(
    config: GroupConfig,
    communicator: Communicator,
    device: torch.device,
    ranks_on_host: int,
    update_progress: Callable[..., None],
) -> Model:
    def check_memory(weight_bytes: int) -> None:
        free = gpu_memory(device)[0] if device.type == "cuda" else host_free_bytes()
        # Every rank has measured before the first one loads.
        check_weights_fit(config, weight_bytes, communicator.all_reduce_min([free])[0], device, ranks_on_host)

    return load_model(
        config.model,
        communicator=communicator,
        dtype=config.dtype,
        quantization=config.quantization,
        activation_quantization=config.activation_quantization,
        device=device,
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
        expert_parallel=config.expert_parallel,
        mla_shard=config.mla_shard,
        attention_backend=config.attention_backend,
        kv_dtype=config.kv_dtype,
        lora_modules=config.lora_modules,
        progress=lambda done, total: update_progress(phase=Phase.LOADING, done_bytes=done, total_bytes=total),
        check_memory=check_memory,
    )


def _measure_free_gpu_bytes(
    config: GroupConfig,
    model: Model,
    layout: BlockLayout,
    communicator: Communicator,
    device: torch.device,
    progress: Progress,
) -> int:
    """The bytes of this rank's GPU that its KV pool may take. All ranks call this together.

    A runner with a small pool captures the CUDA graphs and computes the largest steps. The memory that is then in use,
    less the small pool, is what everything but the KV pool needs: weights, the allocator's peak, graphs, NCCL, compiled
    kernels, and other programs.
    """
    torch.cuda.empty_cache()  # returns what loading left in torch's allocator
    pool = allocate_kv_pool(layout, -(-_MEASURED_TOKENS // config.block_size), device)
    memory = MemoryBudget(layout, pool, None)
    runner = _build_runner(config, model, memory, communicator, model.spec.max_model_len)
    runner.warm_up(progress, max_batch_tokens=config.max_batch_tokens)
    _run_largest_steps(config, runner)
    free, total = gpu_memory(device)
    unmeasured = runner.unmeasured_bytes  # the serving runner may need these besides
    if config.host_kv_memory:
        # The serving runner has a BlockCopier with two staging buffers. This one has none.
        unmeasured += 2 * num_staging_blocks(sys.maxsize, layout.bytes_per_block) * layout.bytes_per_block
    in_use = total - free - pool.nbytes + unmeasured
    runner.close()
    del runner, memory, pool
    gc.collect()
    torch.cuda.empty_cache()
    return free_gpu_bytes(config, in_use=in_use, total=total)


def _build_runner(
    config: GroupConfig,
    model: Model,
    memory: MemoryBudget,
    communicator: Communicator,
    max_model_len: int,
    grammars: GrammarBackend | None = None,
) -> ModelRunner:
    device = memory.pool.device
    return ModelRunner(
        model,
        memory.layout,
        memory.pool,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        copier=make_copier(memory.pool, memory.host, communicator) if memory.host is not None else None,
        grammars=grammars,
        communicator=communicator,
        graph_sizes=_graph_sizes(config, model, device),
        attention_backend=backend_name(config.attention_backend),
        num_snapshots=memory.num_snapshots,
        finds_forced_tokens=config.speculative_tokens > 0,
    )


def _graph_sizes(config: GroupConfig, model: Model, device: torch.device) -> GraphSizes:
    if device.type != "cuda" or not model.supports_cuda_graphs:
        return GraphSizes()
    largest = limit_graphs(
        config.max_cudagraph_capture_size,
        max_blocks=-(-model.spec.max_model_len // config.block_size),
        divides_tokens=any(layer.token_shards > 1 for layer in model.spec.layers),
    )
    return capture_sizes(config.max_num_seqs, config.max_batch_tokens, largest)


def _run_largest_steps(config: GroupConfig, runner: ModelRunner) -> None:
    for plan in largest_plans(
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=runner.max_model_len,
        adapter=min(1, len(runner.model.spec.adapters)),
    ):
        runner.launch(plan).wait()


def _warm_up(config: GroupConfig, runner: ModelRunner, memory: MemoryBudget, progress: Progress) -> CopyReport | None:
    """Run the same first steps on every rank. Return the report on their copies."""
    copy_report = None
    on_gpu = memory.pool.device.type == "cuda"
    if on_gpu:
        # The largest steps, so that a step that does not fit in memory beside the pool fails now, not under load.
        runner.warm_up(progress, max_batch_tokens=config.max_batch_tokens)
        _run_largest_steps(config, runner)
    else:
        num_tokens = min(_WARM_UP_TOKENS, config.max_batch_tokens, runner.max_model_len)
        for plan in warm_up_plans(num_tokens=num_tokens, block_size=config.block_size):
            runner.launch(plan).wait()
    for plan in copy_warm_up_plans(min(memory.host_blocks, memory.num_blocks)):
        copy_report = runner.launch(plan).wait().copy_report or copy_report
        runner.wait_for_copies()
    return copy_report
