"""RankActor: a Rank as a Ray actor; the one file of this room that knows Ray.

Who starts it hands `run` the rendezvous and holds on to the answer, which comes when the rank ends; whoever adopts a
running rank asks `watch` instead. It needs a thread per call under way: see CONCURRENCY.
"""

import logging
import os
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import ray.util

from coatcheck.proto.log_lines import configure_logging
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import RankProgress
from coatcheck.workers.host.crash_record import read_crash
from coatcheck.workers.host.disk_space import describe_full_disk
from coatcheck.workers.host.process_setup import divide_cores, set_thread_environment

if TYPE_CHECKING:
    from coatcheck.workers.rank import Rank

# run, a watch or two, and the short calls beside them.
CONCURRENCY = 8


class RankActor:
    """`loopback`: all ranks are on this host and need no other network. `incarnation`: how many of this group there
    were before."""

    def __init__(self, config: GroupConfig, rank: int, incarnation: int, *, ranks_on_host: int, loopback: bool) -> None:
        self._config = config
        self._number = rank
        self._incarnation = incarnation
        self._ranks_on_host = ranks_on_host
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listener: socket.socket | None = None
        self._rank: Rank | None = None
        self._ended = threading.Event()
        self._failure: Exception | None = None
        # Ray sends both streams of this process to files in its session directory.
        configure_logging(config.log_format, rank=f"{config.name}/{rank}")
        set_thread_environment(threads=divide_cores(config.threads, ranks_on_host), host=self._host)

    def rendezvous(self) -> str:
        """On rank 0: takes a port where the ranks will meet, and returns host:port."""
        self._listener = socket.create_server((self._host, 0))
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def run(self, rendezvous: str) -> None:
        """The rank's life; raises CoatcheckError for what cannot be served."""
        from coatcheck.workers.rank import (
            Rank,  # brings torch and transformers, which take seconds and read the environment set above
        )

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
        """Answers when the rank has ended, as `run` does."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def progress(self) -> RankProgress:
        """How far the rank has come, and whether its host's disk is full."""
        progress = self._rank.progress if self._rank is not None else RankProgress()
        return replace(progress, full_disk=describe_full_disk(os.path.dirname(self.log_file())))

    def log_file(self) -> str:
        """Where this process's log lies on its host."""
        return os.path.realpath("/proc/self/fd/2")

    def predecessor_crash(self) -> str | None:
        """How this rank of the incarnation before has ended, if that was on this host; see read_crash."""
        return read_crash(self._record_base(self._incarnation - 1), [self._number], self._config.tp)

    def _record_base(self, incarnation: int) -> str:
        """The common beginning of the paths of an incarnation's crash records, in a folder of this user beside the
        logs."""
        return f"{os.path.dirname(self.log_file())}/coatcheck-{os.geteuid()}/{self._config.name}.{incarnation}"

    def stop(self) -> None:
        """On rank 0: ends the group after the step under way."""
        if self._rank is not None:
            self._rank.stop()
