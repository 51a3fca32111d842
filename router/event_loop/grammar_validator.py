"""GrammarValidator: refuses a grammar that does not compile, or not soon, before any group hears of it.

Every rank of a group compiles it between two steps of everybody's; so one that takes long is not for them, and those
that take a little come one after another, with pauses. It does not know who asks.
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

TAKES_LONG: Final = "it takes"  # how a reason begins that says nothing of one part of a grammar
# Of the processor, over bytes; a rank takes up to three times as long over its vocabulary.
_MOST_SECONDS: Final = 0.25
_PAUSES: Final = 3.0  # times what the last one took
_MOST_KEPT: Final = 512
_MOST_WAITING: Final = 64


class GrammarValidator:
    """Owns a thread, and from the first grammar on a process (see grammar_compiler)."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler: subprocess.Popen[bytes] | None = None
        self._said: OrderedDict[Grammar, str] = OrderedDict()  # why it is refused; "" for a good one
        self._waiting = 0
        self._closing = threading.Event()

    async def require(self, grammar: Grammar) -> None:
        """Returns once it is known to be good; raises GrammarRefused that says why it is not."""
        said = self._said.get(grammar)
        if said is None:
            if self._waiting >= _MOST_WAITING:
                raise Overloaded(
                    f"{self._waiting} new grammars wait to be compiled; try again shortly", reason="grammars_waiting"
                )
            self._waiting += 1
            try:
                said = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            finally:
                self._waiting -= 1
            self._said[grammar] = said
            if len(self._said) > _MOST_KEPT:
                self._said.popitem(last=False)
        else:
            self._said.move_to_end(grammar)
        if said:
            raise grammar.compile_error(said)

    def close(self) -> None:
        """Ends both."""
        self._closing.set()
        compiler = self._compiler
        if compiler is not None:
            compiler.kill()
        self._thread.shutdown(cancel_futures=True)
        if compiler is not None:
            compiler.communicate()

    def _compile(self, grammar: Grammar) -> str:
        if grammar in self._said:  # somebody else's, while this one waited
            return self._said[grammar]
        answer = self._ask(grammar)
        if answer is None:
            return f"{TAKES_LONG} too long or too much memory, or is nested too deep"
        seconds = float(answer["seconds"])
        self._closing.wait(_PAUSES * min(seconds, _MOST_SECONDS))
        if seconds > _MOST_SECONDS:
            return f"{TAKES_LONG} {seconds:.2f} s to compile, where {_MOST_SECONDS:g} s are the most"
        return answer["error"] or ""

    def _ask(self, grammar: Grammar) -> dict[str, str] | None:
        compiler = self._running()
        assert compiler.stdin is not None and compiler.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            compiler.stdin.write(json.dumps({"kind": grammar.kind, "text": grammar.text}).encode() + b"\n")
            compiler.stdin.flush()
            line = compiler.stdout.readline()
        if line:
            answer: dict[str, str] = json.loads(line)
            return answer
        compiler.kill()
        if not self._closing.is_set():
            compiler.communicate()
            self._compiler = None
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._compiler is None or self._compiler.poll() is not None:
            if self._compiler is not None:
                self._compiler.communicate()
            command = [sys.executable, "-m", "coatcheck.router.event_loop.grammar_validator_process"]
            pipe = subprocess.PIPE
            self._compiler = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        return self._compiler
