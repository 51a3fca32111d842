"""SideProcesses: runs functions in other processes, so that long work never stops the event loop.

A thread is not enough: parsing a large JSON body or making a long list of token ids is one call of C code that holds
the GIL and stops every stream. A function and its arguments go to a child process as one pickle, and its result or its
error comes back as one.

    python -m coatcheck.router.event_loop.side_process FD CPU_SECONDS NICENESS    the child: runs calls from a socket

A child is started by the first call that needs it. A call that takes too much CPU time ends its child; the next call
starts a new one.
"""

import asyncio
import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, ParamSpec, TypeVar

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded, Unavailable

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Two, so that one long call does not delay all others.
_PROCESSES: Final = 2
_ATTEMPTS: Final = 2
_MAX_WAITING: Final = 32
_COMMAND: Final = (sys.executable, "-P", "-m", "coatcheck.router.event_loop.side_process")


class SideProcesses:
    """Owns the child processes and one thread for each. Use it inside one event loop, and `close` it.

    `cpu_seconds`: limit of one call's CPU time; the kernel allows up to a second more. `niceness`: how much lower the
    CPU priority of the children is than the router's.
    """

    def __init__(
        self,
        processes: int = _PROCESSES,
        max_waiting: int = _MAX_WAITING,
        *,
        cpu_seconds: int = 60,
        niceness: int = 5,
    ) -> None:
        self._settings = (str(cpu_seconds), str(niceness))
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="side")
        self._max_waiting = max_waiting
        self._waiting = 0
        self._local = threading.local()  # `running`: the child of this thread, and the connection to it
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # guards _children: each thread starts its own child
        self._closed = threading.Event()

    async def run(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Returns what `function` returns in a child process; it must be importable there by name.

        `function` has no effect but its result: it runs again if its child is ended by SIGKILL.
        Raises the CoatcheckError that `function` raises; InvalidRequest if it crashes its child or takes too much CPU
        time, or if two children are killed; Overloaded if max_waiting calls wait already; RuntimeError for any other
        error.
        """
        if self._waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._waiting} long requests are being processed already; try again shortly", reason="long_requests"
            )
        self._waiting += 1
        try:
            return await self.run_unlimited(function, *arguments, **named)
        finally:
            self._waiting -= 1

    async def run_unlimited(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """As `run`, but never raises Overloaded: for calls whose number the caller limits, such as one for the response
        of an accepted request."""
        # The executor keeps a cancelled call until a thread is free, so that the call must not keep its arguments.
        calls: list[object] = [(function, arguments, named)]
        try:
            is_result, answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._call, calls)
        except asyncio.CancelledError:
            calls.clear()
            raise
        if is_result:
            result: _Result = answer
            return result
        if isinstance(answer, CoatcheckError):
            raise answer
        raise RuntimeError(f"a side process failed: {answer}")

    def close(self) -> None:
        """Kills the children and cancels the calls that wait."""
        self._closed.set()
        with self._lock:
            children = self._children
        for child in children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.wait()

    def _call(self, calls: list[object]) -> tuple[bool, Any]:
        """(True, result) or (False, error) of the call in `calls`, which is taken out."""
        try:
            call = calls.pop()
        except IndexError:  # cancelled at this moment, so that nobody waits for the result
            return False, None
        # The kernel's killer takes a child also for the memory of other processes, so a killed call gets another child.
        for _ in range(_ATTEMPTS):
            child, connection = self._running_child()
            with contextlib.suppress(OSError, EOFError):
                connection.send(call)
                answer: tuple[bool, Any] = connection.recv()
                return answer
            child.kill()
            ended_by = -child.wait()
            if self._closed.is_set():
                return False, Unavailable("this router is stopping; send the request again")
            if ended_by != signal.SIGKILL:  # SIGXCPU, or a crash: the call itself ends its child
                break
        return False, InvalidRequest(
            "this request, or its response, takes too much time or memory; send or ask for less"
        )

    def _running_child(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        """The child of this thread, and the connection to it."""
        running: tuple[subprocess.Popen[bytes], Connection] | None = getattr(self._local, "running", None)
        if running is not None and running[0].poll() is None:
            return running
        connection, end = Pipe()
        with end:
            child = subprocess.Popen(
                [*_COMMAND, str(end.fileno()), *self._settings],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._local.running = child, connection
        with self._lock:
            self._children = [*(child for child in self._children if child.poll() is None), child]
        if self._closed.is_set():
            child.kill()
        return child, connection


def _run_call(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> tuple[bool, Any]:
    function, arguments, named = call
    try:
        return True, function(*arguments, **named)
    except CoatcheckError as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return False, error
    except Exception:
        return False, traceback.format_exc(limit=-5)


def main(fd: int, cpu_seconds: int, niceness: int) -> None:
    """Runs calls from the socket `fd` until its other end closes."""
    connection = Connection(fd)
    # Signals of a terminal, and SIGTERM of systemd to all processes, are for the router, which lets requests end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(EOFError, OSError):
        while True:
            call = connection.recv()
            seconds = math.ceil(time.process_time()) + cpu_seconds
            if most != resource.RLIM_INFINITY:
                seconds = min(seconds, most)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
            connection.send(_run_call(call))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
