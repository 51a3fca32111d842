"""The lanes in which ranks compile grammars: small ones never wait behind a large one, which may take seconds.

A JSON schema of 10,000 letters takes 70 ms on one core, one of 200,000 takes 7 s; so do a few short ones of another
kind now and then, and those hold up their own lane alone. Each lane has a thread, and is in order.
"""

from typing import Final

from ..proto.grammar import Grammar

# So many of each lane are under way at once: what ranks compile between two reports of theirs, and how many of somebody
# else's may be ahead of one that has its turn.
AT_ONCE: Final = (4, 1)
_SMALL_LETTERS: Final = 8192


def lane_of(grammar: Grammar) -> int:
    """Its place in AT_ONCE; every rank says the same."""
    return int(len(grammar.text) > _SMALL_LETTERS)
