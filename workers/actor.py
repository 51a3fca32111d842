"""RankActor: a Rank as a Ray actor. Only this file of `workers` imports Ray.

The supervisor that starts the actor calls `run`, which returns when the rank ends. A supervisor that finds the actor
running calls `watch` instead. Each pending call takes a thread: see CONCURRENCY.
"""

import logging
import os
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import ray.util

from coatcheck.proto.host_port import host_port, listen
from coatcheck.proto.log_lines import configure_logging
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import RankProgress
from coatcheck.workers.host.crash_record import read_crash
from coatcheck.workers.host.disk_space import describe_full_disk
from coatcheck.workers.host.fast_imports import import_transformers, without_garbage_collection
from coatcheck.workers.host.numa import bind_rank
from coatcheck.workers.host.process_setup import divide_cores, set_thread_environment, show_assigned_gpus

if TYPE_CHECKING:
    from coatcheck.workers.rank import Rank

# One `run`, one or two `watch`, and short calls beside them.
CONCURRENCY = 8


class RankActor:
    """`incarnation`: the number of earlier starts of the group in which its ranks came to run (see GroupEndpoint).
    `ranks_on_host`: the number of ranks of all groups on this host. `rank_on_host`: this rank's index among them.
    `loopback`: whether all ranks of the group are on this host. They then connect on 127.0.0.1."""

    def __init__(
        self,
        config: GroupConfig,
        rank: int,
        incarnation: int,
        *,
        rank_on_host: int,
        ranks_on_host: int,
        loopback: bool,
    ) -> None:
        self._config, self._binding = bind_rank(config, rank_on_host, ranks_on_host)
        self._number = rank
        self._incarnation = incarnation
        self._ranks_on_host = ranks_on_host
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listener: socket.socket | None = None
        self._rank: Rank | None = None
        self._ended = threading.Event()
        self._failure: Exception | None = None
        # Ray writes stdout and stderr of this process to files in its session directory.
        configure_logging(config.log_format, rank=f"{config.name}/{rank}")
        set_thread_environment(threads=divide_cores(self._config.threads, ranks_on_host), host=self._host)
        show_assigned_gpus(ray.get_runtime_context().get_accelerator_ids().get("GPU", []), os.environ)

    def rendezvous(self) -> str:
        """For rank 0: bind a port where the ranks will connect to each other. Return host:port."""
        self._listener = listen(self._host, 0)
        return host_port(self._host, self._listener.getsockname()[1])

    def run(self, rendezvous: str) -> None:
        """Serve until the rank ends. Raises CoatcheckError if the model or the settings cannot be served."""
        # Imported here: torch and transformers take seconds to import, and read the environment that __init__ has set.
        with without_garbage_collection():
            import_transformers()
            from coatcheck.workers.rank import Rank

        try:
            self._rank = Rank(
                self._config,
                self._number,
                ranks_on_host=self._ranks_on_host,
                host=self._host,
                listener=self._listener,
                record_base=self._record_base(self._incarnation),
            )
            self._rank.run(rendezvous)
        except Exception as error:
            logging.getLogger(__name__).exception("%s rank %d could not serve", self._config.name, self._number)
            self._failure = error
            raise
        finally:
            self._ended.set()

    def watch(self) -> None:
        """Return or raise as `run` does, when the rank has ended."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def progress(self) -> RankProgress:
        """How far the rank's start has come, with the state of its host and process."""
        progress = self._rank.progress if self._rank is not None else RankProgress()
        full_disk = describe_full_disk(os.path.dirname(self.log_file()))
        return replace(
            progress,
            full_disk=full_disk,
            niceness=os.getpriority(os.PRIO_PROCESS, os.getpid()),
            numa_nodes=self._binding.num_nodes,
            numa_node=self._binding.node_number,
        )

    def log_file(self) -> str:
        """Path of this process's log on its host."""
        return os.path.realpath("/proc/self/fd/2")

    def previous_crash(self) -> str | None:
        """How this rank ended in the previous incarnation, if that ran on this host; see read_crash."""
        return read_crash(self._record_base(self._incarnation - 1), [self._number], self._config.tp)

    def _record_base(self, incarnation: int) -> str:
        """The common start of the paths of an incarnation's crash records. They are in this user's folder beside the
        logs."""
        return f"{os.path.dirname(self.log_file())}/coatcheck-{os.geteuid()}/{self._config.name}.{incarnation}"

    def stop(self) -> None:
        """For rank 0: end the group after the current step."""
        if self._rank is not None:
            self._rank.stop()
