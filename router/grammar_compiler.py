"""A process that compiles grammars and does nothing else, so that one that never ends costs a process and no router.

    python -m coatcheck.router.grammar_compiler    reads {"kind", "text"}, writes {"error", "seconds"}: a JSON line each

A job may have a second or two of the processor and so much memory; what wants more ends the process. It does not know
vocabularies: over single bytes a grammar compiles as it does over tokens, but sooner.
"""

import json
import math
import resource
import sys
import threading
import time

from ..proto.errors import InvalidRequest
from ..proto.grammar import Grammar

_SECONDS = 1
_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 2 << 20


def main() -> None:
    """Until its input ends."""
    # A grammar that is nested deep overflows a stack, which is the end of a process. Ranks have more of it than this.
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    from llguidance import LLMatcher, LLTokenizer

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
            grammar.check()
            matcher = LLMatcher(tokenizer, grammar.compiled(), log_level=0)
            if matcher.is_error():
                raise grammar.refused(matcher.get_error())
        except InvalidRequest as refused:
            error = str(refused)
        answer = {"error": error, "seconds": time.process_time() - began}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
