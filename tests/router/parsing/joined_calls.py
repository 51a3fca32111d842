"""Joins the pieces of tool calls as clients do."""

from collections.abc import Iterable

from coatcheck.router.parsing.parts import Part, ToolCallDelta


def join_named_calls(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """(name, arguments) of each call. Each call's first piece has its name and id, and the pieces come in order."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if not isinstance(part, ToolCallDelta):
            continue
        if part.name:
            assert part.index == len(calls) and part.id
            calls.append((part.name, part.arguments))
        else:
            assert part.index == len(calls) - 1 and not part.id
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return calls
