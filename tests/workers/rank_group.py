"""RankGroup: the ranks of one group as real processes over gloo, without Ray."""

import multiprocessing
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.log_lines import configure_logging
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.rank import Rank

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.workers.host.preloaded_rank"])


class RankGroup:
    """The processes of one group. `kind`: the class of its ranks. `log_folder`: each rank writes its log to the file
    NAME-RANK.log there; None: to this process's stderr."""

    def __init__(
        self, config: GroupConfig, kind: type[Rank] = Rank, record_base: str = "", log_folder: Path | None = None
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(config.tp):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_live, args=(config, rank, rendezvous, theirs, kind, record_base, log_folder), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def wait_ready(self) -> str:
        """Wait until every rank serves. Return rank 0's address."""
        addresses = []
        for pipe in self.pipes:
            while True:
                assert pipe.poll(MAX_WAIT_SECONDS), "a rank says nothing"
                said = pipe.recv()
                assert isinstance(said, RankProgress), said
                if said.phase is Phase.SERVING:
                    addresses.append(said.address)
                    break
        return addresses[0]

    def failures(self) -> list[str]:
        """The error of each rank that could not start."""
        found = []
        for pipe in self.pipes:
            while isinstance(said := pipe.recv(), RankProgress):
                pass
            found.append(said)
        return found

    def exit_codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(MAX_WAIT_SECONDS)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _live(
    config: GroupConfig,
    number: int,
    rendezvous: str,
    pipe: Connection,
    kind: type[Rank],
    record_base: str,
    log_folder: Path | None,
) -> None:
    """The process of a rank: sends its progress into the pipe, and stops the group when the pipe has a message."""
    if log_folder is not None:
        with (log_folder / f"{config.name}-{number}.log").open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        configure_logging(config.log_format, rank=f"{config.name}/{number}")
    rank = kind(config, number, record_base=record_base)

    def report() -> None:
        said = None
        while True:
            if rank.progress.phase is not said:
                said = rank.progress.phase
                pipe.send(rank.progress)
            if pipe.poll(0.01):
                rank.stop()
                return

    threading.Thread(target=report, daemon=True).start()
    try:
        rank.run(rendezvous)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(3)
