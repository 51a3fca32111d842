"""SideProcesses: runs functions in other processes, so that long work never stops the event loop.

A thread is not enough: reading a large JSON body or making a long list of token ids is one call of C code that holds
the GIL, and every stream stands still meanwhile. A function and its arguments go to a child process as one
pickle, and its result or its error comes back as one.

    python -m coatcheck.router.event_loop.side_process    the child: reads calls from its input until that ends

A child starts with the first call that needs one. A call may take a minute of processor time; one that takes more ends
its child, and the next call gets a new one.
"""

import asyncio
import contextlib
import math
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Final, ParamSpec, TypeVar

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded, Unavailable

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Two, so that one long call does not hold up all others; a router needs its own core more than they do.
_PROCESSES: Final = 2
_MOST_WAITING: Final = 32
_CPU_SECONDS: Final = 60
_NICENESS: Final = 5
_LENGTH: Final = struct.Struct("<Q")


class SideProcesses:
    """Owns the children and one thread for each. Use it inside one event loop, and `close` it."""

    def __init__(self, processes: int = _PROCESSES, most_waiting: int = _MOST_WAITING) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="side")
        self._most_waiting = most_waiting
        self._waiting = 0
        self._local = threading.local()  # the child of this thread
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # for `_children`: each thread starts its own
        self._closed = threading.Event()

    async def run(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Returns what `function` returns in a child; it must be importable there by name. Raises the CoatcheckError
        that it raises, InvalidRequest if the child is killed (for its processor time, or by the kernel for its memory),
        Overloaded if too many calls wait already, and RuntimeError for any other error in the child."""
        if self._waiting >= self._most_waiting:
            raise Overloaded(
                f"{self._waiting} long requests are being read already; try again shortly", reason="long_requests"
            )
        self._waiting += 1
        try:
            return await self.finish(function, *arguments, **named)
        finally:
            self._waiting -= 1

    async def finish(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """As `run`, for the answer to a request that has been taken: it waits, however many calls wait already."""
        call = (function, arguments, named)
        is_result, answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._call, call)
        if is_result:
            result: _Result = answer
            return result
        if isinstance(answer, CoatcheckError):
            raise answer
        raise RuntimeError(f"a side process failed: {answer}")

    def close(self) -> None:
        """Ends the children; calls that wait are cancelled."""
        self._closed.set()
        with self._lock:
            children = self._children
        for child in children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.communicate()

    def _call(self, call: object) -> tuple[bool, Any]:
        """(True, result) or (False, error)."""
        child = self._child()
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(OSError, EOFError):
            _write(child.stdin, call)
            answer: tuple[bool, Any] = _read(child.stdout)
            return answer
        child.kill()
        child.communicate()
        if self._closed.is_set():
            return False, Unavailable("this router is stopping; send the request again")
        return False, InvalidRequest("this request, or its answer, takes too much time or memory; send or ask for less")

    def _child(self) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] | None = getattr(self._local, "child", None)
        if child is None or child.poll() is not None:
            command = [sys.executable, "-m", "coatcheck.router.event_loop.side_process"]
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._local.child = child
            with self._lock:
                self._children = [*(one for one in self._children if one.poll() is None), child]
            if self._closed.is_set():
                child.kill()
        return child


def _write(pipe: IO[bytes], value: object) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)  # what our own child, or our own parent, has written


def _answer(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> tuple[bool, Any]:
    function, arguments, named = call
    try:
        return True, function(*arguments, **named)
    except CoatcheckError as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return False, error
    except Exception:
        return False, traceback.format_exc(limit=-5)


def main() -> None:
    """Answers calls until the input ends. What a function prints goes nowhere."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            call = _read(sys.stdin.buffer)
            seconds = math.ceil(time.process_time()) + _CPU_SECONDS
            if most != resource.RLIM_INFINITY:
                seconds = min(seconds, most)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
            _write(answers, _answer(call))


if __name__ == "__main__":
    main()
