"""The prompt tokens queued at a group, between two steps."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.workers.service.router_session import QueuedTokens


def test_submissions_count_until_a_step_has_them() -> None:
    """A submission counts from its arrival; the step that includes it brings the engine's own count."""
    queue = QueuedTokens()
    queue.update(500, 0)
    queue.add_submission(40)
    queue.add_submission(0)  # refused
    queue.add_submission(60)
    assert queue.total == 600
    queue.update(520, 2)
    assert queue.total == 580
    queue.update(70, 3)
    assert queue.total == 70
    queue.check()


@given(st.lists(st.integers(0, 50) | st.none(), max_size=60))
def test_the_total_is_never_late(steps: list[int | None]) -> None:
    """In any order of submissions (numbers) and steps (None), the total is the engine's count plus what waits for the
    next step."""
    queue, waiting, engine, processed = QueuedTokens(), deque[int](), 0, 0
    for tokens in steps:
        if tokens is None:
            half = (len(waiting) + 1) // 2
            engine += sum(waiting.popleft() for _ in range(half))
            processed += half
            queue.update(engine, processed)
        else:
            waiting.append(tokens)
            queue.add_submission(tokens)
        assert queue.total == engine + sum(waiting)
        queue.check()
