"""Rank: one process of a group, from its start to its end, without Ray.

A rank joins the other ranks, loads its slices of the weights, allocates its KV pool and runs the first steps. Then
rank 0 serves the engine over gRPC (Driver), and the other ranks carry out its plans (follow_driver). Once a rank
serves, any failure ends its process at once, so that no rank waits for a dead one.
"""

import dataclasses
import gc
import os
import socket
from typing import Any

import torch

from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.kernels.gpu_properties import LEAST_CAPABILITY
from coatcheck.kernels.native import CpuClassRefused, library
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.distributed.communicator import Communicator, connect_store
from coatcheck.workers.distributed.visible_gpus import check_equal_gpus, show_gpus_of_group
from coatcheck.workers.driver import Driver
from coatcheck.workers.host.crash_record import CrashRecord
from coatcheck.workers.host.free_memory import peak_bytes
from coatcheck.workers.host.process_setup import divide_cores, exit_process
from coatcheck.workers.rank_loading import LoadedRank, load_rank
from coatcheck.workers.runner.tp_runner import follow_driver


class Rank:
    """Call `run` once; it blocks. Other threads may read `progress` and call `stop`.

    `ranks_on_host`: ranks of all groups on this host; they share its cores and memory. Default: this group's.
    `host`: the address where this rank listens and others reach it.
    `listener`: on rank 0, the bound socket whose address is the rendezvous.
    `record_base`: see CrashRecord.
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
        self.compile_watch = CompileWatch()
        self._ranks_on_host = ranks_on_host or config.tp
        self._host = host
        self._listener = listener
        self._is_stopping = False
        self._driver: Driver | None = None
        self._record = CrashRecord(record_base, rank, config.tp)

    def run(self, rendezvous: str) -> None:
        """Start, serve, and return after `stop`. Raises CoatcheckError if model or settings cannot be served."""
        config = self.config
        self._record.open_record()
        torch.set_num_threads(divide_cores(config.threads, self._ranks_on_host))
        communicator, device = self._join(rendezvous)
        loaded = self._load(communicator, device)
        ranks = collect_rank_statuses(communicator, device, loaded.spec.weight_bytes)
        # The loaded objects live as long as the process. Frozen, they are not scanned by a collection during a step.
        gc.collect()
        gc.freeze()
        try:
            if self.rank == 0:
                self._drive(loaded, communicator, ranks)
            else:
                self._update_progress(phase=Phase.SERVING)
                follow_driver(loaded.runner, communicator)
        except BaseException as error:
            self._record.record_error(error)
            exit_process(self.name, error)
        loaded.runner.close()
        communicator.close()
        self._update_progress(phase=Phase.ENDED)

    def stop(self) -> None:
        """End the group after the current step. Call this on rank 0; the other ranks end with rank 0."""
        self._is_stopping = True
        if self._driver is not None:
            self._driver.stop()

    def _join(self, rendezvous: str) -> tuple[Communicator, torch.device]:
        """Connect to the other ranks, and choose this rank's device."""
        config = self.config
        if config.tp == 1:
            return Communicator(), choose_device(config.device)
        store = connect_store(
            self.rank,
            config.tp,
            rendezvous,
            timeout_seconds=config.startup_timeout_seconds,
            listener=self._listener,
        )
        index = show_gpus_of_group(store, self.rank, config.tp, os.environ)
        device = choose_device(config.device, index)
        check_equal_gpus(store, self.rank, config.tp, kind_of_gpu(device))
        communicator = Communicator.join(
            self.rank,
            config.tp,
            store,
            device=device,
            timeout_seconds=config.collective_timeout_seconds,
            startup_timeout_seconds=config.startup_timeout_seconds,
            sum_in_rank_order=config.deterministic,
        )
        return communicator, device

    def _load(self, communicator: Communicator, device: torch.device) -> LoadedRank:
        return load_rank(
            self.config,
            communicator,
            device,
            ranks_on_host=self._ranks_on_host,
            compile_watch=self.compile_watch,
            update_progress=self._update_progress,
        )

    def _drive(self, loaded: LoadedRank, communicator: Communicator, ranks: list[public.RankStatus]) -> None:
        """Rank 0: schedule and serve until `stop`."""
        driver = Driver(
            self.config,
            loaded,
            communicator,
            ranks,
            name=self.name,
            host=self._host,
            record=self._record,
            count_late_compiles=self.compile_watch.num_late,
        )
        self._update_progress(
            phase=Phase.SERVING,
            address=driver.address,
            num_blocks=loaded.memory.num_blocks,
            max_model_len=driver.engine.max_model_len,
            model_len=loaded.spec.max_model_len,
            dtype=loaded.spec.dtype,
            kernels=driver.kernels,
        )
        self._driver = driver
        if not self._is_stopping:
            driver.run()
        driver.close()

    def _update_progress(self, **changed: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changed)


def choose_device(name: str, index: int = 0) -> torch.device:
    """The device for "auto", "cpu" or "cuda", where `index` is this rank's GPU.

    Raises InvalidConfig for "cuda" on a host without a usable GPU, for a GPU that is too old, and on a CPU for a
    COATCHECK_CPU that the processor lacks.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device is cuda, and this host has no usable GPU; use --device cpu or fix the driver")
    if name == "cpu" or not torch.cuda.is_available():
        try:
            library()
        except CpuClassRefused as error:
            raise InvalidConfig(str(error)) from None
        return torch.device("cpu")
    # Some container images enable TF32 with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. Its mantissa has 10 bits. transformers
    # computes RoPE's angles by a matmul of positions and frequencies: TF32 would round positions above 2,048.
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", index)  # NCCL needs the index
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        raise InvalidConfig(
            f"GPU {index} has compute capability {capability[0]}.{capability[1]}, and the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (Ampere) or later; use another GPU or --device cpu"
        )
    torch.cuda.set_device(device)
    return device


def kind_of_gpu(device: torch.device) -> str:
    """As check_equal_gpus takes it."""
    if device.type == "cpu":
        return "no GPU"
    capability = torch.cuda.get_device_capability(device)
    return f"compute capability {capability[0]}.{capability[1]}"


def collect_rank_statuses(
    communicator: Communicator, device: torch.device, weight_bytes: int
) -> list[public.RankStatus]:
    """The status of every rank after its warm-up. A collective: every rank must call it. `weight_bytes`: of this
    rank."""
    own = {
        "node": socket.gethostname()[:200],
        "pid": os.getpid(),
        "peak_memory_bytes": peak_bytes(device),
        "weight_bytes": weight_bytes,
    }
    return [
        public.RankStatus(rank=rank, healthy=True, **each)
        for rank, each in enumerate(communicator.all_gather_json(own))
    ]
