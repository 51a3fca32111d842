"""choose_snapshot_points(): where a group saves the states that recurrent layers have after a prompt's blocks.

Groups save snapshots at these points. Routers call the same function to predict which snapshots a group will have. A
*snapshot point* is a number of leading blocks of a sequence; its snapshot is a copy of the states after these blocks.
"""

from typing import Final

# A snapshot costs a copy of the states and one more step, because a prompt's chunk ends at each point. To compute fewer
# tokens than this again costs less than a snapshot.
MIN_SNAPSHOT_TOKENS: Final = 64
# A chat template ends a prompt with tokens that the next turn does not repeat: `<think>` and a line feed, or an empty
# thought of four tokens.
_TEMPLATE_TOKENS: Final = 4


def choose_snapshot_points(
    start: int, num_known: int, *, prompt_len: int, num_tokens: int, block_size: int, num_choices: int
) -> list[int]:
    """The snapshot points of a sequence that starts after its first `start` blocks, ascending:

    - where it branches off from earlier prompts, which is after its `num_known` leading blocks with cached KV. So the
      second request with a system prompt saves that prompt's states.
    - near its end, before the tokens that the next turn does not repeat.
    - if the request has several choices: also near the end of the prompt, where the other choices start.

    `prompt_len`: tokens of the prompt. `num_tokens`: tokens of the prompt and of the resumed output. Two points are at
    least MIN_SNAPSHOT_TOKENS apart; the point near the end of a prompt with several choices may follow after one block.
    """
    end, prompt_end = (max(count - _TEMPLATE_TOKENS, 0) // block_size for count in (num_tokens, prompt_len))
    is_shared = num_choices > 1
    points: list[int] = []
    for point in sorted({min(num_known, end), end, *([prompt_end] if is_shared else [])}):
        min_tokens = block_size if is_shared and point == prompt_end else MIN_SNAPSHOT_TOKENS
        if (point - start) * block_size >= min_tokens:
            points.append(point)
            start = point
    return points
