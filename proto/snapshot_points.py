"""Where groups save the states of a prompt, and routers expect them to."""

from typing import Final

# A snapshot costs a copy of the states and a step of its own, because a chunk ends at it. With fewer tokens than this
# behind the states before it, computing them again costs no more.
MIN_SNAPSHOT_TOKENS: Final = 64
# A chat template ends a prompt with tokens that the next turn does not repeat: `<think>` and a line feed, or an empty
# thought of four tokens.
_TEMPLATE_TOKENS: Final = 4


def last_point(num_tokens: int, block_size: int) -> int:
    """The number of leading blocks of a prompt that the next turn of its conversation will repeat."""
    return max(num_tokens - _TEMPLATE_TOKENS, 0) // block_size


def is_far_enough(start: int, point: int, block_size: int, num_choices: int) -> bool:
    """Whether the states at the end of the first `point` blocks are saved if those of the first `start` blocks are
    there. The other choices of a request start at the snapshot of its prompt, however short the prompt is."""
    return (point - start) * block_size >= (MIN_SNAPSHOT_TOKENS if num_choices == 1 else block_size)
