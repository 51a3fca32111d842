"""How many examples a property test tries: fewer in `make test` than in `make test-all`, which sets TEST_ALL."""

import os

_FACTOR = 4 if "TEST_ALL" in os.environ else 1


def examples(count: int) -> int:
    """`count` in `make test`, four times as many in `make test-all`."""
    return count * _FACTOR
