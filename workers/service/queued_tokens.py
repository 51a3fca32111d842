"""QueuedTokens: the prompt tokens queued at the group, as known between two steps.

The engine counts its queue after each step, and a step with a long prompt takes tenths of a second. Submissions that
arrive meanwhile wait in the engine loop. They are added here, so that a submission can be returned to its router at
once and not only after the step.
"""

from collections import deque


class QueuedTokens:
    """Used in the service's event loop only. Submissions of all routers are numbered together from 1."""

    def __init__(self) -> None:
        self._after_step = 0
        self._unprocessed: deque[tuple[int, int]] = deque()  # (number, prompt tokens to compute)
        self._unprocessed_tokens = 0
        self._received = 0

    @property
    def total(self) -> int:
        """Prompt tokens of waiting and running requests that are not computed yet."""
        return self._after_step + self._unprocessed_tokens

    def add_submission(self, tokens: int) -> None:
        """Count the next submission. `tokens`: prompt tokens to compute; 0 if the submission was refused or
        returned."""
        self._received += 1
        if tokens:
            self._unprocessed.append((self._received, tokens))
            self._unprocessed_tokens += tokens

    def update(self, after_step: int, num_processed: int) -> None:
        """Take the engine's count after a step, which includes the first `num_processed` submissions."""
        self._after_step = after_step
        while self._unprocessed and self._unprocessed[0][0] <= num_processed:
            self._unprocessed_tokens -= self._unprocessed.popleft()[1]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        numbers = [number for number, _ in self._unprocessed]
        assert numbers == sorted(set(numbers)) and max(numbers, default=0) <= self._received, "order of submissions"
        assert self._unprocessed_tokens == sum(tokens for _, tokens in self._unprocessed), "sum of tokens"
