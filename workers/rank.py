"""Rank: one process's part of a group, from its start to its end, without Ray.

It joins the other ranks, loads its slices, sizes the pool with them and runs the first steps; then rank 0 serves the
engine over gRPC and the others follow its plans. Once it serves, any failure ends the process at once, so that no rank
waits for one that is gone. It does not know who started it, nor any other group.
"""

import dataclasses
import gc
import logging
import os
import socket
from typing import Any

import torch

from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.rank_facts import gather
from coatcheck.workers.driver import Driver
from coatcheck.workers.host.crash_record import CrashRecord
from coatcheck.workers.host.free_memory import peak_bytes
from coatcheck.workers.host.process_setup import die, divide_cores
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.cuda_block_copier import make_copier
from coatcheck.workers.runner.cuda_graphs import graph_sizes
from coatcheck.workers.runner.memory_budget import MemoryBudget
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import follow
from coatcheck.workers.runner.warm_up import copy_warm_up_plans, warm_up_plans
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_WARM_UP_TOKENS = 64

_log = logging.getLogger(__name__)


class Rank:
    """`run` is called once and blocks; `stop` (on rank 0) and `progress` may be used from other threads.

    `ranks_on_host`: of all groups, who share its cores and memory. `host`: where it listens, and others reach it.
    `listener`: rank 0's bound socket, whose address is the rendezvous. `record_base`: see CrashRecord.
    """

    def __init__(
        self,
        config: GroupConfig,
        rank: int,
        *,
        ranks_on_host: int | None = None,
        host: str = "127.0.0.1",
        listener: socket.socket | None = None,
        record_base: str = "",
    ) -> None:
        self.config = config
        self.rank = rank
        self.name = f"{config.name} rank {rank}"
        self.progress = RankProgress()
        self._ranks_on_host = ranks_on_host or config.tp
        self._host = host
        self._listener = listener
        self._stopping = False
        self._leader: Driver | None = None
        self.compile_watch = CompileWatch()
        self._record = CrashRecord(record_base, rank, config.tp)

    def run(self, rendezvous: str) -> None:
        """The rank's life. Raises CoatcheckError for what cannot be served; returns when the group was stopped."""
        config = self.config
        self._record.keep()
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
        grammars = GrammarBackend.load(model.directory, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
        if device.type == "cuda":
            self.compile_watch.start()
        layout = BlockLayout.of(spec.layers, config.block_size, choose_kv_dtype(config.kv_dtype, spec.dtype))
        memory = MemoryBudget.take(config, layout, communicator, device, ranks_on_host=self._ranks_on_host)
        runner = self._build_runner(model, memory, communicator, grammars)
        copies = self._warm_up(runner, memory)
        ranks = rank_statuses(communicator, device)
        # What is loaded stays: the collector need not walk it again in the middle of a step.
        gc.collect()
        gc.freeze()
        try:
            if self.rank == 0:
                leader = Driver(
                    config,
                    spec,
                    runner,
                    communicator,
                    memory,
                    ranks,
                    name=self.name,
                    host=self._host,
                    record=self._record,
                    grammars=grammars,
                    copies=copies,
                    compiled=self.compile_watch.late,
                )
                self._lead(leader, memory, spec)
            else:
                self._note(phase=Phase.SERVING)
                follow(runner, communicator)
        except BaseException as error:
            self._record.note(error)
            die(self.name, error)
        communicator.close()
        self._note(phase=Phase.ENDED)

    def stop(self) -> None:
        """Asks rank 0 to end the group after the step under way; the other ranks end with it."""
        self._stopping = True
        if self._leader is not None:
            self._leader.stop()

    def _build_runner(
        self, model: Model, memory: MemoryBudget, communicator: Communicator, grammars: GrammarBackend
    ) -> ModelRunner:
        device = memory.pool.device
        max_num_seqs = self.config.max_num_seqs
        return ModelRunner(
            model,
            memory.layout,
            memory.pool,
            max_num_seqs=max_num_seqs,
            max_model_len=min(model.spec.max_model_len, memory.tokens),
            copier=make_copier(memory.pool, memory.host, communicator) if memory.host is not None else None,
            grammars=grammars,
            communicator=communicator,
            graph_sizes=graph_sizes(max_num_seqs) if device.type == "cuda" and model.capturable else (),
        )

    def _warm_up(self, runner: ModelRunner, memory: MemoryBudget) -> CopyReport | None:
        """The same first steps on every rank; returns what the copies among them took."""
        config, copies = self.config, None
        on_gpu = memory.pool.device.type == "cuda"
        if on_gpu:
            runner.warm()
        # On a GPU at full size, so that what does not fit beside the pool is found now and not under load.
        wanted = config.max_batch_tokens if on_gpu else _WARM_UP_TOKENS
        room = min(runner.model.spec.max_model_len, memory.tokens)
        for plan in warm_up_plans(num_tokens=min(wanted, config.max_batch_tokens, room), block_size=config.block_size):
            runner.launch(plan).wait()
        for plan in copy_warm_up_plans(min(memory.host_blocks, memory.num_blocks)):
            copies = runner.launch(plan).wait().copies or copies
            runner.settle_copies()
        self.compile_watch.ready()
        return copies

    def _lead(self, leader: Driver, memory: MemoryBudget, spec: ModelSpec) -> None:
        """Rank 0: schedules and serves until `stop`."""
        self._note(
            phase=Phase.SERVING,
            address=leader.address,
            num_blocks=memory.num_blocks,
            max_model_len=leader.engine.max_model_len,
            model_len=spec.max_model_len,
            dtype=spec.dtype,
        )
        self._leader = leader
        if not self._stopping:
            leader.run()
        leader.close()

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


def rank_statuses(communicator: Communicator, device: torch.device) -> list[public.RankStatus]:
    """What every rank has to say of itself once it is warm."""
    mine = {"node": socket.gethostname()[:200], "pid": os.getpid(), "peak": peak_bytes(device)}
    return [
        public.RankStatus(rank=rank, healthy=True, node=fact["node"], pid=fact["pid"], peak_memory_bytes=fact["peak"])
        for rank, fact in enumerate(gather(communicator, device, mine))
    ]
