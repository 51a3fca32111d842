"""Rank: one process's part of a group, from its start to its end, without Ray.

It joins the other ranks, loads its slices, sizes the pool with them and runs the first steps; then rank 0 serves the
engine over gRPC and the others follow its plans. Once it serves, any failure ends the process at once, so that no rank
waits for one that is gone. It does not know who started it, nor any other group.
"""

import dataclasses
import gc
import json
import logging
import os
import socket
import uuid
from typing import Any

import torch

from ..kernels.compile_watch import CompileWatch
from ..kernels.native import native_status
from ..proto import coatcheck_pb2 as public
from ..proto import worker_pb2 as wire
from ..proto.contract import CONTRACT, VERSION
from ..proto.errors import InvalidConfig
from ..proto.tracing import Tracing
from .block_layout import BlockLayout
from .communicator import Communicator
from .copy_report import CopyReport
from .decode_graphs import graph_sizes
from .engine import Engine
from .engine_loop import EngineLoop
from .free_memory import free_bytes, peak_bytes
from .grammars import Grammars
from .group_config import GroupConfig
from .group_runner import GroupRunner, follow
from .host_memory import allocate_host, choose_host_blocks
from .kv_dtype import choose_kv_dtype
from .kv_pool import allocate_pool
from .model import Model, load_model
from .model_spec import ModelSpec
from .pool_size import choose_num_blocks
from .rank_process import die, divide_cores
from .rank_progress import Phase, RankProgress
from .runner import ModelRunner
from .service import WorkerService
from .stream_copier import make_copier
from .warm_up import copy_warm_up_plans, warm_up_plans

_FACTS_BYTES = 512
_WARM_UP_TOKENS = 64

_log = logging.getLogger(__name__)


class Rank:
    """`run` is called once and blocks; `stop` (on rank 0) and `progress` may be used from other threads.

    `ranks_on_host`: of all groups, who share its cores and memory. `host`: where it listens, and others reach it.
    `listener`: rank 0's bound socket, whose address is the rendezvous.
    """

    def __init__(
        self,
        config: GroupConfig,
        rank: int,
        *,
        ranks_on_host: int | None = None,
        host: str = "127.0.0.1",
        listener: socket.socket | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.name = f"{config.name} rank {rank}"
        self.progress = RankProgress()
        self._ranks_on_host = ranks_on_host or config.tp
        self._host = host
        self._listener = listener
        self._stopping = False
        self._copies: CopyReport | None = None  # what the first of them took
        self._loop: EngineLoop | None = None
        self.compile_watch = CompileWatch()

    def run(self, rendezvous: str) -> None:
        """The rank's life. Raises CoatcheckError for what cannot be served; returns when the group was stopped."""
        config = self.config
        torch.set_num_threads(divide_cores(config.threads, self._ranks_on_host))
        device = choose_device(config.device)
        communicator = Communicator.join(
            self.rank,
            config.tp,
            rendezvous,
            device=device,
            timeout_seconds=config.collective_timeout_seconds,
            meeting_seconds=config.meeting_seconds,
            in_order=config.deterministic,
            listener=self._listener,
        )
        model = load_model(
            config.model,
            communicator=communicator,
            dtype=config.dtype,
            device=device,
            max_model_len=config.max_model_len,
            deterministic=config.deterministic,
            progress=self._loading,
        )
        communicator.meet()
        self._note(phase=Phase.WARMING)
        # Routers name the model as its operator does, and block hashes hold that name.
        spec = dataclasses.replace(model.spec, name=config.served_model_name)
        grammars = Grammars.load(model.directory, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
        if device.type == "cuda":
            self.compile_watch.start()
        runner, host_blocks = self._build_runner(model, communicator, device, grammars)
        ranks = self._warm_up(runner, communicator, host_blocks)
        # What is loaded stays: the collector need not walk it again in the middle of a step.
        gc.collect()
        gc.freeze()
        try:
            if self.rank == 0:
                self._lead(spec, runner, communicator, host_blocks, ranks, grammars)
            else:
                self._note(phase=Phase.SERVING)
                follow(runner, communicator)
        except BaseException as error:
            die(self.name, error)
        communicator.close()
        self._note(phase=Phase.ENDED)

    def stop(self) -> None:
        """Asks rank 0 to end the group after the step under way; the other ranks end with it."""
        self._stopping = True
        if self._loop is not None:
            self._loop.stop()

    def _build_runner(
        self, model: Model, communicator: Communicator, device: torch.device, grammars: Grammars
    ) -> tuple[ModelRunner, int]:
        """The runner, and how many blocks its host memory has."""
        config, spec = self.config, model.spec
        layout = BlockLayout.of(spec.layers, config.block_size, choose_kv_dtype(config.kv_dtype, spec.dtype))
        block, on_cpu = layout.bytes_per_block, device.type == "cpu"
        fits = choose_num_blocks(
            config.kv_memory,
            free_bytes=free_bytes(device),
            sharing_ranks=self._ranks_on_host if on_cpu else 1,
            bytes_per_block=block,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
        host_fits = choose_host_blocks(
            config.host_kv_memory,
            free_bytes=free_bytes(torch.device("cpu")) - (fits * block * self._ranks_on_host if on_cpu else 0),
            sharing_ranks=self._ranks_on_host,
            bytes_per_block=block,
        )
        everyone = gather(communicator, device, {"fits": fits, "host": host_fits})
        num_blocks, host_blocks = (min(facts[name] for facts in everyone) for name in ("fits", "host"))
        pool = allocate_pool(layout, num_blocks, device)
        host = allocate_host(host_blocks, block, device) if host_blocks else None
        runner = ModelRunner(
            model,
            layout,
            pool,
            max_num_seqs=config.max_num_seqs,
            max_model_len=min(spec.max_model_len, num_blocks * config.block_size),
            copier=make_copier(pool, host, communicator) if host is not None else None,
            grammars=grammars,
            graph_sizes=graph_sizes(config.max_num_seqs) if device.type == "cuda" and model.capturable else (),
        )
        return runner, host_blocks

    def _warm_up(self, runner: ModelRunner, communicator: Communicator, host_blocks: int) -> list[public.RankStatus]:
        """The same first steps on every rank; returns what each has to say of itself."""
        config, device = self.config, runner.pool.device
        if device.type == "cuda":
            runner.warm()
        # On a GPU at full size, so that what does not fit beside the pool is found now and not under load.
        wanted = config.max_batch_tokens if device.type == "cuda" else _WARM_UP_TOKENS
        room = min(runner.model.spec.max_model_len, len(runner.pool) * config.block_size)
        for plan in warm_up_plans(num_tokens=min(wanted, config.max_batch_tokens, room), block_size=config.block_size):
            runner.launch(plan).wait()
        for plan in copy_warm_up_plans(min(host_blocks, len(runner.pool))):
            self._copies = runner.launch(plan).wait().copies or self._copies
            runner.settle_copies()
        self.compile_watch.ready()
        facts = gather(
            communicator, device, {"node": socket.gethostname()[:200], "pid": os.getpid(), "peak": peak_bytes(device)}
        )
        return [
            public.RankStatus(
                rank=rank, healthy=True, node=fact["node"], pid=fact["pid"], peak_memory_bytes=fact["peak"]
            )
            for rank, fact in enumerate(facts)
        ]

    def _lead(
        self,
        spec: ModelSpec,
        runner: ModelRunner,
        communicator: Communicator,
        host_blocks: int,
        ranks: list[public.RankStatus],
        grammars: Grammars,
    ) -> None:
        """Rank 0: schedules and serves until `stop`."""
        config, on_gpu = self.config, runner.pool.device.type == "cuda"
        num_blocks, bytes_per_block = runner.pool.shape
        group_runner = GroupRunner(runner, communicator) if communicator.size > 1 else None
        engine = Engine(
            spec,
            group_runner or runner,
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=config.max_model_len,
            eviction=config.eviction,
            pipeline_depth=1 if on_gpu else 0,
            grammars=grammars,
        )
        engine.price(self._copies)
        kernels = "triton" if on_gpu else native_status()
        registration = self._registration(spec, engine, num_blocks, host_blocks)
        tracing = Tracing.to(config.otlp_endpoint, "coatcheck-group", config.name)
        service = WorkerService(
            registration,
            ranks,
            kernels=kernels,
            bytes_per_block=bytes_per_block,
            plane=config.plane,
            tracing=tracing,
            compiled=self.compile_watch.late,
            max_open=config.max_num_seqs + config.max_waiting,
        )
        loop = EngineLoop(engine, on_step=service.publish, on_death=lambda error: die(self.name, error))
        address = service.start(loop, f"{self._host}:0")
        self._note(
            phase=Phase.SERVING,
            address=f"{self._host}:{address.rpartition(':')[2]}",
            num_blocks=num_blocks,
            max_model_len=engine.max_model_len,
            model_len=spec.max_model_len,
            dtype=spec.dtype,
        )
        _log.info(
            "%s serves on %s: %d blocks of %d tokens, %d in host memory",
            config.name,
            address,
            num_blocks,
            config.block_size,
            host_blocks,
        )
        self._loop = loop
        if not self._stopping:
            loop.run()
        if group_runner is not None:
            group_runner.stop()
        service.stop()
        if tracing is not None:
            tracing.close()

    def _registration(self, spec: ModelSpec, engine: Engine, num_blocks: int, host_blocks: int) -> wire.Registration:
        model = public.GetModelResponse(
            name=spec.name,
            max_model_len=engine.max_model_len,
            vocab_size=spec.vocab_size,
            block_size=engine.block_size,
            dtype=spec.dtype,
            kv_dtype=choose_kv_dtype(self.config.kv_dtype, spec.dtype),
            fingerprint=spec.fingerprint,
            eos_token_ids=spec.eos_token_ids,
        )
        return wire.Registration(
            group=self.config.name,
            epoch=str(uuid.uuid4()),
            model=model,
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            tp=spec.tp,
            max_num_seqs=self.config.max_num_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            contract=CONTRACT,
            version=VERSION,
        )

    def _loading(self, done: int, total: int) -> None:
        self._note(phase=Phase.LOADING, done_bytes=done, total_bytes=total)

    def _note(self, **changed: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changed)


def choose_device(name: str) -> torch.device:
    """The device of that name on this host; raises InvalidConfig when it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device is cuda, and this host has no usable GPU; use --device cpu or fix the driver")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # NCCL wants to know which one


def gather(communicator: Communicator, device: torch.device, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's facts, in rank order: small JSON objects, padded with blanks to one size."""
    encoded = json.dumps(facts).encode().ljust(_FACTS_BYTES)
    assert len(encoded) == _FACTS_BYTES, "facts are small"
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    everyone = bytes(communicator.all_gather(mine, dim=0).cpu().numpy())
    return [json.loads(everyone[at : at + _FACTS_BYTES]) for at in range(0, len(everyone), _FACTS_BYTES)]
