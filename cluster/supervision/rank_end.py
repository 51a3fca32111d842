"""RankEnd: how a rank has ended, in words, from what Ray says of its process."""

from ray.exceptions import RayError, RayTaskError


class RankEnded(Exception):
    """A rank has ended; the message says which and why."""


def cause_of(error: BaseException | None) -> BaseException | None:
    """What a rank's own code raised; None when the process itself died."""
    return error.cause if isinstance(error, RayTaskError) else None


def brief(error: BaseException | None) -> str:
    """In a few words."""
    if error is None:
        return "it returned"
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        return "its process died"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"
