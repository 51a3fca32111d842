"""Driver: what rank 0 does besides computing its part of each step: it schedules, and serves routers over gRPC."""

import logging
import uuid
from collections.abc import Callable
from typing import NoReturn

from coatcheck.kernels.native import native_status
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.host_port import host_port
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.tracing import Tracing
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.engine.step_watchdog import StepWatchdog, longest_step_seconds
from coatcheck.workers.host.crash_record import CrashRecord
from coatcheck.workers.host.process_setup import exit_process
from coatcheck.workers.rank_loading import LoadedRank, build_engine
from coatcheck.workers.runner.memory_budget import MemoryBudget
from coatcheck.workers.runner.tp_runner import TpRunner
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService

_log = logging.getLogger(__name__)


class Driver:
    """The constructor starts the gRPC service at `address`. `run` steps until any thread calls `stop`. Then call
    `close`.

    `loaded`: rank 0 after its warm-up. `count_late_compiles`: returns how many kernels were compiled since then.
    """

    def __init__(
        self,
        config: GroupConfig,
        loaded: LoadedRank,
        communicator: Communicator,
        ranks: list[public.RankStatus],
        *,
        name: str,
        host: str,
        record: CrashRecord,
        count_late_compiles: Callable[[], int],
    ) -> None:
        spec, memory = loaded.spec, loaded.memory
        kernels = "triton" if memory.pool.device.type == "cuda" else native_status()
        model = loaded.runner.model
        activations, padding = model.describe_activations(), model.padding_bytes()
        notes = (
            kernels,
            activations,
            model.note,
            _describe_states(spec, memory.num_snapshots),
            f"{padding:,} bytes of padding beside the weights" if padding else "",
        )
        self.kernels = "; ".join(note for note in notes if note)
        self._name = name
        self._record = record
        self._tp_runner = TpRunner(loaded.runner, communicator) if communicator.size > 1 else None
        self.engine = build_engine(config, loaded, self._tp_runner or loaded.runner)
        self._tracing = Tracing.export_to(config.otlp_endpoint, "coatcheck-group", config.name)
        report = GroupReport(
            _registration(config, spec, self.engine, memory),
            ranks,
            kernels=self.kernels,
            bytes_per_block=memory.layout.bytes_per_block,
            count_late_compiles=count_late_compiles,
            replicates_latents=spec.tp > 1
            and any(layer.is_latent and layer.token_shards == 1 for layer in spec.layers),
            divides_latents=any(layer.token_shards > 1 for layer in spec.layers),
            expert_tokens=_count_from_now(loaded.runner.model.expert_tokens),
        )
        self._service = WorkerService(
            report,
            certificate=config.cluster_certificate,
            tracing=self._tracing,
            max_open=config.max_num_seqs + config.max_waiting,
        )
        self._loop = EngineLoop(self.engine, on_step=self._service.publish, on_death=self._die)
        self._config = config
        self._watchdog = StepWatchdog(self._loop, self._hang_seconds, self._die)
        address = self.address = self._service.start(self._loop, host_port(host, 0))
        _log.info(
            "%s serves on %s: %d blocks of %d tokens, %d in host memory",
            config.name,
            address,
            memory.num_blocks,
            config.block_size,
            memory.host_blocks,
        )

    def run(self) -> None:
        """Step in this thread until `stop`. Call this in the thread that ran the warm-up (see EngineLoop)."""
        self._watchdog.start()
        self._loop.run()
        self._watchdog.stop()

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._loop.stop()

    def close(self) -> None:
        """Stop the other ranks and end every stream."""
        if self._tp_runner is not None:
            self._tp_runner.stop_followers()
        self._service.stop()
        if self._tracing is not None:
            self._tracing.close()

    def _hang_seconds(self) -> float:
        """The seconds after which a step counts as hung. The collectives of a CUDA graph have no timeout."""
        longest = longest_step_seconds(self._loop.prefill_tokens_per_second, self._config.max_batch_tokens)
        return self._config.collective_timeout_seconds + longest

    def _die(self, error: BaseException) -> NoReturn:
        """End the process, and thereby the group, after the engine has failed or a step hangs. If the cause is known,
        send it to the routers first, because a running request may have caused the failure. In the engine's thread, or
        in the watchdog's."""
        try:
            self._record.record_error(error)
            if cause := self._record.describe_cause(error):
                self._service.send_failure_notice(cause, self.engine.unstarted_requests())
        finally:  # also if the failure notice cannot be sent
            exit_process(self._name, error)


def _count_from_now(count: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """A function that returns `count()` less its values of now, so that the warm-up is left out."""
    before = count()
    return lambda: [now - then for now, then in zip(count(), before, strict=True)]


def _describe_states(spec: ModelSpec, num_snapshots: int) -> str:
    if not spec.state_layers:
        return ""
    snapshots = f"{num_snapshots:,} snapshots for the prefix cache" if num_snapshots else "no prefix cache"
    return f"{spec.state_bytes:,} bytes of states a sequence, {snapshots}"


def _registration(config: GroupConfig, spec: ModelSpec, engine: Engine, memory: MemoryBudget) -> wire.Registration:
    model = public.GetModelResponse(
        name=spec.name,
        max_model_len=engine.max_model_len,
        vocab_size=spec.vocab_size,
        block_size=engine.block_size,
        dtype=spec.dtype,
        kv_dtype=choose_kv_dtype(config.kv_dtype, spec.dtype),
        fingerprint=spec.fingerprint,
        eos_token_ids=spec.eos_token_ids,
        adapters=[public.Adapter(name=one.name, fingerprint=one.fingerprint) for one in spec.adapters],
    )
    return wire.Registration(
        group=config.name,
        epoch=str(uuid.uuid4()),
        model=model,
        num_blocks=memory.num_blocks,
        host_blocks=memory.host_blocks,
        tp=spec.tp,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        contract=CONTRACT,
        version=VERSION,
        no_prefix_cache=not engine.has_prefix_cache,
        keeps_states=bool(spec.state_layers),
    )
