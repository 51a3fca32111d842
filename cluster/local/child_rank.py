"""ChildRank: one rank as a child process, and the socket to it (see workers/rank_process.py)."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from coatcheck.cluster.early_process import COMMAND, EarlyProcess, take_early_process
from coatcheck.workers.core.rank_progress import RankProgress
from coatcheck.workers.host.process_setup import divide_cores
from coatcheck.workers.rank_process import RankStart

_READ_SECONDS: Final = 1.0


class ChildRank:
    """`exit`: done when the process has ended and its last messages are read. `error`: the exception that the rank has
    sent; None if it has sent none. `log`: the file of its output."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: Connection, log: Path) -> None:
        self.error: Exception | None = None
        self.log = log
        self._process = process
        self._connection = connection
        self._asked: list[asyncio.Future[RankProgress]] = []
        self._has_ended = asyncio.Event()
        self._is_read = asyncio.Event()  # set at the end of the connection
        loop = asyncio.get_running_loop()
        loop.add_reader(connection.fileno(), self._receive)
        threading.Thread(target=self._wait_in_thread, args=(loop,), daemon=True).start()
        self.exit = asyncio.ensure_future(self._wait())

    @classmethod
    def start(cls, start: RankStart, log: Path, environment: Mapping[str, str]) -> Self:
        """Start the process, or take the early one. `environment`: variables that the rank has in addition to those of
        this process."""
        if early := _take_early_process(start):
            child = cls(early.process, early.connection, log)
            child.send(replace(start, listener=None, log=str(log)))
            return child
        ours, theirs = Pipe()
        descriptors = [theirs.fileno(), *([start.listener] if start.listener is not None else [])]
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone
            )
        child = cls(process, ours, log)
        child.send(start)
        return child

    def ask_progress(self) -> asyncio.Future[RankProgress]:
        """The rank's answer. Raises EOFError when the process ends before it answers."""
        answer: asyncio.Future[RankProgress] = asyncio.get_running_loop().create_future()
        if self._connection.closed:
            answer.set_exception(EOFError())
        else:
            self._asked.append(answer)
            self.send("progress")
        return answer

    def send(self, message: object) -> None:
        """Send the message, unless the process has ended."""
        with suppress(OSError):
            self._connection.send(message)

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._process.kill()

    def _wait_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._has_ended.set)

    async def _wait(self) -> None:
        await self._has_ended.wait()
        with suppress(TimeoutError):  # a process that the rank has forked may hold the socket open
            await asyncio.wait_for(self._is_read.wait(), _READ_SECONDS)

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._is_read.set()
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(EOFError())
            self._asked.clear()
            return
        if isinstance(message, Exception):
            self.error = message
        elif self._asked:
            answer = self._asked.pop(0)
            if not answer.done():
                answer.set_result(message)


async def wait_until_ended(ranks: Sequence[ChildRank], seconds: float) -> bool:
    """Wait at most `seconds`. Return whether all have ended."""
    if ranks:
        await asyncio.wait([rank.exit for rank in ranks], timeout=seconds)
    return all(rank.exit.done() for rank in ranks)


def _take_early_process(start: RankStart) -> EarlyProcess | None:
    """The early process, if the rank of `start` may run in it. Otherwise it is ended."""
    early = take_early_process()
    if early is None:
        return None
    is_alone = start.ranks_on_host == 1 and start.config.device == "cpu"
    if is_alone and divide_cores(start.config.threads, 1) == divide_cores(0, 1):
        return early
    early.kill()
    return None
