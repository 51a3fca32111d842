"""Tier: where a block's keys and values lie."""

from enum import Enum


class Tier(Enum):
    """The values are those of the worker contract's enum."""

    DEVICE = 1
    HOST = 2
