"""AnswerTags: the tags around an answer are no content."""

import pytest

from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import Content
from coatcheck.router.parsing.reasoning_parser import ReasoningStart
from tests.router.parsing.parsed_text import read_every_cut

COHERE = "<|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|>"
HUNYUAN = "<think> </think> <answer> </answer> <tool_calls>"


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        (HUNYUAN, "<think>\nhm\n</think>\n<answer>\nyes\n\nno\n</answer>", ("hm", "yes\n\nno", [])),
        (HUNYUAN, "<think></think><answer>a < b </ans wer</answer>", ("", "a < b </ans wer", [])),
        (HUNYUAN, "<answer>yes\n", ("", "yes\n", [])),
        (HUNYUAN, "write <answer>x</answer>", ("", "write <answer>x</answer>", [])),
        (HUNYUAN, "<think>hm</think>yes </answer>", ("hm", "yes </answer>", [])),
        (HUNYUAN, "<answer>a</answer> b </answer>", ("", "a b </answer>", [])),
        (HUNYUAN, " \n<ans", ("", " \n<ans", [])),
        (HUNYUAN, '<think>hm</think><answer>so</answer><tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
         ("hm", "so", [("f", "{}")])),
        (COHERE, "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", ("hm", "yes", [])),
        (COHERE, '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]'
         "<|END_ACTION|>", ("hm", "", [("f", "{}")])),
        ("<think> </think> <tool_call>", "<think>hm</think><answer>yes</answer>", ("hm", "<answer>yes</answer>", [])),
        ("<answer> <tool_call>", "<answer>yes</answer>", ("", "<answer>yes</answer>", [])),
    ],
)  # fmt: skip
def test_tags_around_the_answer_are_removed(
    template: str, text: str, wanted: tuple[str, str, list[tuple[str, str]]]
) -> None:
    """Only tags that the template of a reasoning model has, and only around the answer."""
    assert read_every_cut(ParsingPlan(OutputFormat.detect(template, ()), tool_mode="auto"), text) == wanted


def test_an_answer_between_tags_is_streamed() -> None:
    """Only what may belong to the end tag is held back, and white space without end is not."""
    parser = OutputParser(ParsingPlan(OutputFormat.detect(HUNYUAN, ()), ReasoningStart.CLOSED))
    assert parser.feed("<answer>\n") == []
    assert parser.feed("yes </an") == [Content("yes")]
    assert parser.feed("d>\n") == [Content(" </and>")]
    for _ in range(1000):
        parser.feed(" \n")
    assert sum(len(part.text) for part in parser.finish() if isinstance(part, Content)) < 600
