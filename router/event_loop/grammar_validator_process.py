"""A process that only compiles grammars, so that a grammar that never finishes ends this process and not a router.

    python -m coatcheck.router.event_loop.grammar_validator_process

It reads JSON lines {"kind", "text"} and answers each with a JSON line {"error", "seconds"}.

A grammar may take a second or two of CPU time and _MEMORY_BYTES; one that takes more ends the process. The tokenizer's
tokens are single bytes: the same grammars compile as over a vocabulary, but faster. After compiling, the matcher is fed
_BYTES_FOLLOWED allowed bytes, because some limits of the parser are reached only then; on a rank they would end a
response that has begun.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar, GrammarRefused, describe_matcher_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SECONDS = 1
_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 2 << 20
_BYTES_FOLLOWED: Final = 32
_ALL_BYTES: Final = (1 << 256) - 1  # as a bit mask; the other tokens of the byte tokenizer are special ones
_PART_SECONDS: Final = 0.25
_SHARED: Final = ("$defs", "definitions", "$schema")  # keywords of the root that schemas inside it may need
_SCHEMAS_BY_NAME: Final = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_SCHEMAS: Final = frozenset({
    "items", "additionalProperties", "additionalItems", "prefixItems", "anyOf", "allOf", "oneOf", "not"
})  # fmt: skip


def main() -> None:
    """Serves until stdin ends."""
    # A deeply nested grammar overflows the stack and ends the process; the kernel logs a segfault in llguidance's
    # _lib.abi3.so. Ranks have a larger stack than this (see workers/runner/grammar_compiler.py).
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(began) + _SECONDS, most))
        error = None
        try:
            grammar = Grammar(**json.loads(line))
            _check_grammar(grammar, tokenizer)
        except GrammarRefused as refused:
            error = refused.reason
        result = {"error": error, "seconds": time.process_time() - began}
        if error and grammar.kind == "json_schema":
            pointer = _failing_part(grammar, error, began + _PART_SECONDS)
            result["error"] = f"{error}, at {pointer}" if pointer else error
        sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
        sys.stdout.buffer.flush()


def _check_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Raises GrammarRefused if the grammar does not compile or cannot be followed."""
    from llguidance import LLMatcher

    grammar.check_compiles()
    matcher = LLMatcher(tokenizer, grammar.to_llguidance(), log_level=0)
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
            if isinstance(part, dict) and _without_location(_reason({**shared, **part})) == _without_location(reason):
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


def _reason(schema: dict[str, Any]) -> str:
    try:
        Grammar("json_schema", json.dumps(schema)).check_compiles()
    except GrammarRefused as refused:
        return refused.reason
    except InvalidRequest:  # too long with all definitions
        pass
    return ""


if __name__ == "__main__":
    main()
