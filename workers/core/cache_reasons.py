"""PrefixMiss: why a prompt's prefix was not found where it ends, and why blocks are evicted.

Plain values. For the operator, not for clients: that another tenant has asked for the same tokens is nobody's business.
"""

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Where a block is stored. The values equal those of `Tier` in the worker contract."""

    DEVICE = 1
    HOST = 2


class EvictionReason(Enum):
    """Why this block and no other; the public contract counts by these names."""

    UNWANTED = 1  # its request said that it will not be wanted again
    WORTH_LEAST = 2
    OVER_SHARE = 3  # its tenant held more than others that are short of their fair share
    NOTHING_ELSE = 4  # what was left was sheltered or retained


class MissReason(Enum):
    """Why it was not there; the public contract counts by these names."""

    NEVER_SEEN = 1  # or so long ago that nothing is remembered of it
    EVICTED = 2
    OTHER_SALT = 3  # the same tokens were asked for under another salt only
    BROKEN = 4  # its bytes came back wrong from host memory
    RECOMPUTED = 5  # host memory has it, but computing it is sooner


@dataclass(frozen=True, slots=True)
class EvictionMark:
    """When a block left the last tier that held it, which that was, and why."""

    at: float
    tier: Tier
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The block of this index had to be computed, and those after it, though they might have been found."""

    index: int
    reason: MissReason
    evicted: EvictionMark | None = None
    seconds_ago: float = 0.0  # it was evicted


def content_chain(token_ids: tuple[int, ...], block_size: int) -> list[int]:
    """Of each full block, a number for it and all before it, whoever asks: only good enough to explain a miss."""
    chain, before = list[int](), 0
    for end in range(block_size, len(token_ids) + 1, block_size):
        before = hash((before, token_ids[end - block_size : end]))
        chain.append(before)
    return chain
