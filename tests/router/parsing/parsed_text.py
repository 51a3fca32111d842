"""Reads a text in pieces with an OutputParser, as a response does."""

from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import Content, Part, Reasoning
from tests.router.parsing.joined_calls import join_named_calls


def read(plan: ParsingPlan, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, (name, arguments) of each call) of a text in pieces. The parser's spans must have the
    reasoning."""
    parser = OutputParser(plan)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    if plan.shows_reasoning:
        text = "".join(pieces)
        assert "".join(text[start:stop] for start, stop in parser.reasoning_spans).strip() == reasoning.strip()
    return reasoning, content, join_named_calls(parts)


def read_every_cut(plan: ParsingPlan, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """As `read`, whole. In two pieces, cut anywhere, and in single characters the result must be the same."""
    whole = read(plan, [text])
    for place in range(1, len(text)):
        assert read(plan, [text[:place], text[place:]]) == whole, (text[:place], text[place:])
    assert read(plan, list(text)) == whole
    return whole
