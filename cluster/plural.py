"""Counted: a number and its noun, in the singular where there is one."""


def counted(number: int, noun: str) -> str:
    """1 group, 2 groups."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
