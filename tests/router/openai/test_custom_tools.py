"""Custom tools in /v1/chat/completions: their input is a text, which a grammar may constrain."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion_message_custom_tool_call import ChatCompletionMessageCustomToolCall

from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, TOOL_TEMPLATE, WEATHER, allows, saying, tokens_until
from tests.router.tiny_tokenizer import write_model

PATCH = '*** Begin\n+say "hi"\n*** End'
PATCH_TOOL: Any = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
LARK = 'start: "*** Begin" LF ("+" /.*/ LF)+ "*** End"\n%import common.LF\n'
GRAMMAR: Any = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}}
GRAMMAR_TOOL: Any = {"type": "custom", "custom": {**PATCH_TOOL["custom"], "format": GRAMMAR}}


def call_of(text: str) -> str:
    """How the model writes a call with this input."""
    return f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'


WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that calls tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), TOOL_TEMPLATE)))


async def test_a_call_of_a_custom_tool_has_its_input(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Beside a call of a function. The model sees the tool as a function with one text."""
    router = await start_http_router(saying(f"so {call_of(PATCH)}\n{WEATHER_CALL}"), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[PATCH_TOOL, WEATHER], max_tokens=400)
    made: ChatCompletion = await router.openai.chat.completions.create(**asked)
    (choice,) = made.choices
    custom, function = choice.message.tool_calls or []
    assert isinstance(custom, ChatCompletionMessageCustomToolCall) and custom.id.startswith("call_")
    assert (custom.custom.name, custom.custom.input) == ("patch", PATCH)
    assert function.type == "function" and json.loads(function.function.arguments) == {"city": "Bonn"}
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so ")
    prompt = await router.last_prompt()
    shown = json.loads(prompt.partition("[tool ")[2].partition("][tool ")[0])
    assert (shown["type"], shown["function"]["name"]) == ("function", "patch")
    assert shown["function"]["parameters"]["properties"]["input"]["type"] == "string"
    assert not router.groups[0].submits[-1].sampling.HasField("structured")


async def test_a_stream_has_the_input_in_pieces(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The first piece has the id, the type and the name."""
    group = saying(f"{call_of(PATCH)}\n{WEATHER_CALL}")
    holds = [tokens_until(call_of(PATCH), place) for place in ('{"input": ', "Begin", "say")]
    group.hold_after = holds.pop(0)
    router = await start_http_router(group, tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[PATCH_TOOL, WEATHER], max_tokens=400)
    pieces: list[dict[str, Any]] = []
    async for chunk in await router.openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces += [piece.model_dump(exclude_unset=True) for piece in choice.delta.tool_calls or []]
            reason = choice.finish_reason
            if choice.delta.tool_calls:
                group.go(holds.pop(0) if holds else None)
    custom = [piece for piece in pieces if piece["index"] == 0]
    assert custom[0] == {"index": 0, "id": custom[0]["id"], "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert "".join(piece["custom"]["input"] for piece in custom) == PATCH and len(custom) > 3
    assert all(piece.keys() == {"index", "custom"} for piece in custom[1:])
    assert [piece["type"] for piece in pieces if "type" in piece] == ["custom", "function"]
    assert reason == "tool_calls"


async def test_earlier_calls_are_shown_to_the_model(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The answer's own message goes back, with the result of the tool."""
    router = await start_http_router(saying(call_of(PATCH)), tokenizer=model)
    create = router.openai.chat.completions.create
    made = await create(model="tiny", messages=HELLO, tools=[PATCH_TOOL], max_tokens=400)
    message = made.choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history: list[Any] = [*HELLO, message.model_dump(), result]
    await create(model="tiny", messages=history, tools=[PATCH_TOOL], max_tokens=400)
    prompt = await router.last_prompt()
    assert '"name": "patch"' in prompt and json.dumps({"input": PATCH}) in prompt and prompt.endswith("<tool>done")


async def test_a_grammar_constrains_the_input(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Where the model may answer with text, where the call is required, and where it is named. The model sees the
    grammar."""
    router = await start_http_router(saying(call_of(PATCH)), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[GRAMMAR_TOOL, WEATHER], max_tokens=400)
    named: Any = {"type": "custom", "custom": {"name": "patch"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    good, bad = json.dumps({"input": PATCH}), json.dumps({"input": "*** Begin\n*** End"})
    choices: list[tuple[Any, str]] = [
        ("auto", '<tool_call>\n{"name": "patch", "arguments": %s}\n</tool_call>'),
        ("required", '[{"name": "patch", "arguments": %s}]'),
        (named, "%s"),
        (allowed, '[{"name": "patch", "arguments": %s}]'),
    ]
    for choice, form in choices:
        await router.openai.chat.completions.create(**asked, tool_choice=choice)
        grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
        assert allows(grammar, form % good) and not allows(grammar, form % bad), choice
        assert json.dumps(LARK)[1:-1] in await router.last_prompt()
    assert not allows(grammar, '[{"name": "weather"')


async def test_a_named_tool_is_called(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Without a grammar too; the answer is the arguments alone."""
    router = await start_http_router(saying(json.dumps({"input": PATCH})), tokenizer=model)
    made = await router.openai.chat.completions.create(
        model="tiny", messages=HELLO, tools=[PATCH_TOOL], max_tokens=400,
        tool_choice={"type": "custom", "custom": {"name": "patch"}},
    )  # fmt: skip
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "custom" and call.custom.input == PATCH


async def test_each_choice_has_a_call(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """An input that a stop string or max_tokens cuts has the text before the cut, without the JSON around it."""
    router = await start_http_router(saying(call_of(PATCH)), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[PATCH_TOOL], n=2)
    before = len('<tool_call>\n{"name": "patch", "arguments": {"inp')
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_tokens": 400}, PATCH, "tool_calls"),
        ({"max_tokens": 400, "stop": ["say"]}, "*** Begin\n+", "stop"),
        ({"max_tokens": before}, "", "length"),
    ]
    for changes, text, reason in cases:
        made = await router.openai.chat.completions.create(**asked, **changes)
        assert len(made.choices) == 2
        for choice in made.choices:
            (call,) = choice.message.tool_calls or []
            assert call.type == "custom" and (call.custom.input, choice.finish_reason) == (text, reason)


def custom(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "custom": {"name": "patch", **fields}}]}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


WHERE = "tools[0].custom.format.grammar, of 'patch', cannot be enforced"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name is missing"),
    "another type": (
        {"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'; it must be one of 'function', 'custom'"),
    "a format without a grammar": (custom(format={"type": "grammar"}), "tools.0.custom.format.grammar is missing"),
    "another format": (custom(format={"type": "xml"}), "tools.0.custom.format.type is 'xml'"),
    "another syntax": (custom(format=grammar("gbnf", "x")), "tools.0.custom.format.grammar.syntax is 'gbnf'"),
    "an unknown field": (custom(parameters={}), "Unknown parameter 'tools.0.custom.parameters'"),
    "a wrong grammar": (custom(format=grammar("lark", "start: missing")), WHERE),
    "a wrong pattern": (custom(format=grammar("regex", "a(")), WHERE),
    "a blank grammar": (custom(format=grammar("lark", " \n")), WHERE),
    "a wrong class": (custom(format=grammar("lark", r"start: /[a-\s]/")), "has 'a-"),
    "half of a surrogate": (custom(format=grammar("lark", r'start: "\ud800"')), "surrogate"),
    "what JSON lacks": (custom(format=grammar("lark", "start: <|end|>")), "set the tool's format to text"),
    "another tool": (
        custom() | {"tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "names 'other', which is not"),
    "one name twice": ({"tools": [PATCH_TOOL, PATCH_TOOL]}, "are both named 'patch'"),
    "structured output": (
        custom(format=GRAMMAR) | {"response_format": {"type": "json_object"}}, "custom tools that have a grammar"),
}  # fmt: skip


async def test_what_is_not_served_is_refused(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Each wrong body gets a 400 that says what is wrong, and reaches no group."""
    group = saying("no")
    router = await start_http_router(group, tokenizer=model)
    for case, (changes, words) in REFUSED.items():
        body = {"model": "tiny", "messages": HELLO, **changes}
        error = await router.expect_refusal("/v1/chat/completions", body)
        assert words in error["message"], (case, error)
        if words == WHERE:
            assert error["param"] == "tools[0].custom.format.grammar"
    assert not group.submits
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        call: Any = {"id": "c", "type": "custom", "custom": {"name": "patch"}}
        await router.openai.chat.completions.create(
            model="tiny", messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]
        )
