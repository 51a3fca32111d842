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
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.driver import Driver
from coatcheck.workers.host.crash_record import CrashRecord
from coatcheck.workers.host.free_memory import peak_bytes
from coatcheck.workers.host.process_setup import die, divide_cores
from coatcheck.workers.rank_loading import load_rank
from coatcheck.workers.runner.memory_budget import MemoryBudget
from coatcheck.workers.runner.tp_runner import follow

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
            startup_timeout_seconds=config.meeting_seconds,
            sum_in_rank_order=config.deterministic,
            listener=self._listener,
        )
        loaded = load_rank(
            config,
            communicator,
            device,
            ranks_on_host=self._ranks_on_host,
            compile_watch=self.compile_watch,
            on_bytes_loaded=self._loading,
            on_model_loaded=lambda: self._note(phase=Phase.WARMING),
        )
        ranks = rank_statuses(communicator, device)
        # What is loaded stays: the collector need not walk it again in the middle of a step.
        gc.collect()
        gc.freeze()
        try:
            if self.rank == 0:
                leader = Driver(
                    config,
                    loaded.spec,
                    loaded.runner,
                    communicator,
                    loaded.memory,
                    ranks,
                    name=self.name,
                    host=self._host,
                    record=self._record,
                    grammars=loaded.grammars,
                    copies=loaded.copies,
                    compiled=self.compile_watch.late,
                )
                self._lead(leader, loaded.memory, loaded.spec)
            else:
                self._note(phase=Phase.SERVING)
                follow(loaded.runner, communicator)
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
        for rank, fact in enumerate(communicator.all_gather_json(mine))
    ]
