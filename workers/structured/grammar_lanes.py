"""The lanes in which ranks compile grammars: small ones never wait behind large ones.

A JSON schema of 3,000 letters takes 8 ms of a core, one of 33,000 takes 0.4 s, about the largest that a router lets by.
What is short and dear all the same holds up the small ones. Each lane has a thread of its own, and keeps its order.
"""

from typing import Final

from coatcheck.proto.grammar import Grammar

# So many of each lane are under way at once: what ranks compile between two reports of theirs, and how many of somebody
# else's may be ahead of one that has its turn.
AT_ONCE: Final = (4, 1)
_SMALL_LETTERS: Final = 8192


def lane_of(grammar: Grammar) -> int:
    """Its place in AT_ONCE; every rank says the same."""
    return int(len(grammar.text) > _SMALL_LETTERS)
