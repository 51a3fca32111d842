"""Why a prompt's prefix was not cached, and why blocks were evicted.

Only operators may see these reasons. Clients must not learn that another tenant asked for the same tokens.
"""

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Where a block is stored. The values equal those of `Tier` in the worker contract."""

    DEVICE = 1
    HOST = 2
    STATE = 3  # no KV: a snapshot of the states at the block's end


class EvictionReason(Enum):
    """Why the cache evicted this block rather than another. The public contract uses these names."""

    UNWANTED = 1  # a request said that it is not needed again
    LOWEST_VALUE = 2  # first in the order of the eviction policy
    OVER_FAIR_SHARE = 3  # first in that order, except for blocks of tenants below their fair share
    LAST_RESORT = 4  # only retained blocks and those of tenants below their fair share were left


class MissReason(Enum):
    """Why a block was not in the cache. The public contract uses these names."""

    NEVER_SEEN = 1  # or its record was dropped since
    EVICTED = 2
    OTHER_SALT = 3  # requests with another salt, or another adapter, asked for the same tokens
    CORRUPT = 4  # its checksum did not match when it was restored
    RECOMPUTED = 5  # the host tier has it, but computing it is faster
    NO_SNAPSHOT = 6  # its KV is cached, but no snapshot of the model's states at its end or after it


@dataclass(frozen=True, slots=True)
class EvictionMark:
    """When and why a block left the last tier that held it. `at`: seconds of the engine's clock."""

    at: float
    tier: Tier
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Block `index` of a prompt was the first that had to be computed. `seconds_ago`: since its eviction."""

    index: int
    reason: MissReason
    evicted: EvictionMark | None = None
    seconds_ago: float = 0.0


def content_chain(token_ids: tuple[int, ...], block_size: int) -> list[int]:
    """For each full block, a hash of its tokens and all before them, without salt.

    The hash is not collision-resistant. It serves only to explain misses.
    """
    chain, parent = list[int](), 0
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash((parent, token_ids[end - block_size : end]))
        chain.append(parent)
    return chain
