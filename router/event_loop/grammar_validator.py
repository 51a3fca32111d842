"""GrammarValidator: compiles each new grammar in a side process, before any group gets it.

Every rank of a group compiles a grammar while it computes steps, which delays all of the group's streams. So a grammar
that takes long is refused, and new grammars are passed on one after another, with pauses.

A grammar may take a second or two of CPU time and _MEMORY_BYTES; one that takes more ends the side process and not the
router. It is compiled for a tokenizer whose tokens are single bytes: the same grammars compile as with the model's
tokenizer, but faster. After compiling, the matcher is fed _BYTES_FOLLOWED allowed bytes, because some limits of the
parser are reached only then; on a rank they would end a response that has begun.
"""

import asyncio
import json
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.errors import InvalidRequest, Overloaded
from coatcheck.proto.grammar import Grammar, GrammarRefused, describe_matcher_error
from coatcheck.router.event_loop.side_process import SideProcesses

TAKES_LONG: Final = "it takes"  # the beginning of a reason that concerns a grammar as a whole
# Limit of CPU time. Compiled over bytes; with a real vocabulary a rank takes up to three times as long.
_MAX_SECONDS: Final = 0.25
_PAUSE_FACTOR: Final = 3.0  # pause after a grammar, as a multiple of its compile time
_MAX_CACHED: Final = 512
_MAX_WAITING: Final = 64
_MEMORY_BYTES: Final = 2 << 30
# A deeply nested grammar overflows the stack and ends the process; the kernel logs a segfault in llguidance's
# _lib.abi3.so. Ranks have a larger stack than this (see workers/structured/grammar_compiler.py).
_STACK_BYTES: Final = 2 << 20
_BYTES_FOLLOWED: Final = 32
_ALL_BYTES: Final = (1 << 256) - 1  # as a bit mask; the other tokens of the byte tokenizer are special ones
_PART_SECONDS: Final = 0.25  # CPU time of the attempt to compile and of the search for the part that fails
_SHARED: Final = ("$defs", "definitions", "$schema")  # keywords of the root that schemas inside it may need
_SCHEMAS_BY_NAME: Final = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_SCHEMAS: Final = frozenset({
    "items", "additionalProperties", "additionalItems", "prefixItems", "anyOf", "allOf", "oneOf", "not"
})  # fmt: skip


class GrammarValidator:
    """Owns a side process from the first grammar on."""

    def __init__(self) -> None:
        self._process = SideProcesses(processes=1, cpu_seconds=1, niceness=0)
        self._reasons: OrderedDict[Grammar, str] = OrderedDict()  # why a grammar is refused; "" for a valid one
        self._compiling = asyncio.Lock()
        self._waiting = 0

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
                async with self._compiling:
                    reason = self._reasons.get(grammar)  # of another request with the same grammar
                    if reason is None:
                        reason = self._reasons[grammar] = await self._compile(grammar)
            finally:
                self._waiting -= 1
            if len(self._reasons) > _MAX_CACHED:
                self._reasons.popitem(last=False)
        else:
            self._reasons.move_to_end(grammar)
        if reason:
            raise grammar.compile_error(reason)

    def close(self) -> None:
        self._process.close()

    async def _compile(self, grammar: Grammar) -> str:
        """Why the grammar is refused, or ""."""
        try:
            error, seconds = await self._process.run_unlimited(compile_grammar, grammar)
        except InvalidRequest:  # the grammar has ended the process
            return f"{TAKES_LONG} too long or too much memory, or is nested too deep"
        if seconds > _MAX_SECONDS:
            return f"{TAKES_LONG} {seconds:.2f} s to compile; at most {_MAX_SECONDS:g} s are allowed"
        return error


def compile_grammar(grammar: Grammar) -> tuple[str, float]:
    """(why the grammar is refused, or ""; seconds of CPU time that it takes). Runs in a side process, and ends that
    process for a grammar that takes too much memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    results: list[tuple[str, float]] = []
    thread = threading.Thread(target=lambda: results.append(_try_grammar(grammar)))
    thread.start()
    thread.join()
    if not results:
        os._exit(1)
    error, seconds = results[0]
    # In this process, because a client that disconnects ends the router's wait for the result, but not the pause.
    time.sleep(_PAUSE_FACTOR * min(seconds, _MAX_SECONDS))
    return error, seconds


def _try_grammar(grammar: Grammar) -> tuple[str, float]:
    tokenizer = _byte_tokenizer()
    began = time.process_time()
    try:
        _check_grammar(grammar, tokenizer)
    except GrammarRefused as refused:
        seconds = time.process_time() - began
        pointer = _failing_part(grammar, refused.reason, began + _PART_SECONDS) if grammar.kind == "json_schema" else ""
        return f"{refused.reason}, at {pointer}" if pointer else refused.reason, seconds
    return "", time.process_time() - began


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _check_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Raises GrammarRefused if the grammar does not compile or cannot be followed."""
    grammar.check_compiles()
    # Without the prefix, whose special tokens the vocabulary of bytes lacks.
    matcher = LLMatcher(tokenizer, replace(grammar, prefix="").to_llguidance(), log_level=0)
    if matcher.is_error():
        raise grammar.compile_error(matcher.get_error())
    if not any(matcher.compute_bitmask()):
        raise grammar.compile_error(describe_matcher_error(matcher))
    for pick in (_lowest, _highest):  # for JSON the first leads through a string, the second through an object
        _follow(grammar, matcher.deep_copy(), pick)


def _follow(grammar: Grammar, matcher: LLMatcher, pick: Callable[[int], int]) -> None:
    for _ in range(_BYTES_FOLLOWED):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & _ALL_BYTES
        if allowed and not matcher.is_error():
            matcher.consume_token(pick(allowed))
        if matcher.is_error():
            raise grammar.compile_error(describe_matcher_error(matcher))
        if not allowed or matcher.is_stopped():
            return


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1


def _failing_part(grammar: Grammar, reason: str, ends_at: float) -> str:
    """The JSON pointer of the innermost schema inside a JSON schema that is refused for the same reason, or "". The
    search ends at `ends_at`, by process_time()."""
    try:
        root = json.loads(grammar.text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(root, dict):
        return ""
    shared = {name: root[name] for name in _SHARED if name in root}
    pointer, schema, is_found = "", root, True
    while is_found:
        is_found = False
        for path, part in _subschemas(schema):
            if time.process_time() > ends_at:
                break
            if not isinstance(part, dict):
                continue
            refusal = _refusal_of({**shared, **part})
            if refusal and _without_location(refusal) == _without_location(reason):
                pointer, schema, is_found = f"{pointer}/{path}", part, True
                break
    return f"#{pointer}" if pointer else ""


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """(relative JSON pointer, schema) of the schemas directly inside a schema; definitions first."""
    for keyword in (*_SHARED, *sorted(schema.keys() - set(_SHARED))):
        value = schema.get(keyword)
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", part
        elif keyword in _SCHEMAS and isinstance(value, list):
            for index, part in enumerate(value):
                yield f"{keyword}/{index}", part
        elif keyword in _SCHEMAS:
            yield keyword, value


def _without_location(reason: str) -> str:
    return reason.partition(" while processing ")[0]


def _refusal_of(schema: dict[str, Any]) -> str:
    """Why a schema does not compile, or ""."""
    try:
        Grammar("json_schema", json.dumps(schema)).check_compiles()
    except GrammarRefused as refused:
        return refused.reason
    except InvalidRequest:  # too long with all definitions
        pass
    return ""
