"""The script of `make demo`: its prompts, and what it prints of each."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from coatcheck.router.text.tokenizer import TokenizerJson
from tests.cluster.fake_router import FakeRouter

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("demo", DEMO / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_prompt_is_long_enough_to_show_the_cache(demo: ModuleType) -> None:
    """The first prompt has about 1,000 tokens, and the follow-up with the answer fits the model's context."""
    tokenizer = TokenizerJson.load(str(DEMO / "model"))
    first, rest = (len(tokenizer.encode(text, True)) for text in (demo.FIRST, demo.FOLLOW_UP))
    assert 1000 <= first <= 1200 and first + rest + 2 * demo.MAX_TOKENS < 2048


async def test_prompts_and_answers_have_labels(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """In a log without colours each prompt and answer has a line of its own that says what follows, and cached tokens
    stand beside the time to the first token."""
    async with FakeRouter() as router:
        answers = await demo.converse(router.address)
    demo.console.print(demo.as_table(answers))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("prompt ")] == [
        "prompt 1 of 3, a long one; its end:",
        "prompt 2 of 3, prompt 1 with its answer and some lines more; its end:",
        "prompt 3 of 3, another text; its end:",
    ]
    assert lines.count("answer:") == 3
    assert sum(line.startswith("took: ") and "prompt tokens were cached" in line for line in lines) == 3
    (head,) = (line for line in lines if "TTFT" in line)
    assert head.index("cached") < head.index("TTFT")
