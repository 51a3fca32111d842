"""GrammarValidator: compiles each new grammar in a process of its own, before any group gets it.

Every rank of a group compiles a grammar while it computes steps, which delays all of the group's streams. So a grammar
that takes long is refused, and new grammars are passed on one after another, with pauses.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from coatcheck.proto.errors import Overloaded
from coatcheck.proto.grammar import Grammar

TAKES_LONG: Final = "it takes"  # the beginning of a reason that concerns a grammar as a whole
# Limit of CPU time. Compiled over bytes; with a real vocabulary a rank takes up to three times as long.
_MAX_SECONDS: Final = 0.25
_PAUSE_FACTOR: Final = 3.0  # pause after a grammar, as a multiple of its compile time
_MAX_CACHED: Final = 512
_MAX_WAITING: Final = 64


class GrammarValidator:
    """Owns a thread, and a grammar_validator_process from the first grammar on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._process: subprocess.Popen[bytes] | None = None
        self._reasons: OrderedDict[Grammar, str] = OrderedDict()  # why a grammar is refused; "" for a valid one
        self._waiting = 0
        self._closing = threading.Event()

    async def validate(self, grammar: Grammar) -> None:
        """Raises GrammarRefused, with the reason, or Overloaded if too many new grammars wait."""
        reason = self._reasons.get(grammar)
        if reason is None:
            if self._waiting >= _MAX_WAITING:
                raise Overloaded(
                    f"{self._waiting} new grammars wait to be compiled; try again shortly", reason="grammars_waiting"
                )
            self._waiting += 1
            try:
                reason = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            finally:
                self._waiting -= 1
            self._reasons[grammar] = reason
            if len(self._reasons) > _MAX_CACHED:
                self._reasons.popitem(last=False)
        else:
            self._reasons.move_to_end(grammar)
        if reason:
            raise grammar.compile_error(reason)

    def close(self) -> None:
        """Stops the thread and the process."""
        self._closing.set()
        process = self._process
        if process is not None:
            process.kill()
        self._thread.shutdown(cancel_futures=True)
        if process is not None:
            process.communicate()

    def _compile(self, grammar: Grammar) -> str:
        if grammar in self._reasons:  # another request had the same grammar compiled meanwhile
            return self._reasons[grammar]
        result = self._compile_in_process(grammar)
        if result is None:
            return f"{TAKES_LONG} too long or too much memory, or is nested too deep"
        seconds = float(result["seconds"])
        self._closing.wait(_PAUSE_FACTOR * min(seconds, _MAX_SECONDS))
        if seconds > _MAX_SECONDS:
            return f"{TAKES_LONG} {seconds:.2f} s to compile; at most {_MAX_SECONDS:g} s are allowed"
        return result["error"] or ""

    def _compile_in_process(self, grammar: Grammar) -> dict[str, str] | None:
        """{"error", "seconds"}; None if the grammar ended the process."""
        process = self._running_process()
        assert process.stdin is not None and process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"kind": grammar.kind, "text": grammar.text}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            result: dict[str, str] = json.loads(line)
            return result
        process.kill()
        if not self._closing.is_set():
            process.communicate()
            self._process = None
        return None

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                self._process.communicate()
            command = [sys.executable, "-m", "coatcheck.router.event_loop.grammar_validator_process"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._process
