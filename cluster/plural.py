"""counted: a number with its noun."""


def counted(number: int, noun: str) -> str:
    """`number` and `noun` with a plural s if `number` is not 1, such as "1 group" or "2,000 groups"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
