"""Custom tools in /v1/responses, as Codex sends them."""

import json
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_custom_tool_call_item import ResponseCustomToolCallItem

from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import TOOL_TEMPLATE, allows, saying, tokens_until
from tests.router.tiny_tokenizer import write_model

PATCH = '*** Begin\n+say "hi"\n*** End'
LARK = 'start: "*** Begin" LF ("+" /.*/ LF)+ "*** End"\n%import common.LF\n'
FREE: Any = {"type": "custom", "name": "patch", "description": "Edits files.", "format": {"type": "text"}}
PATCH_TOOL: Any = {**FREE, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
WEATHER: Any = {
    "type": "function", "name": "weather", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def call_of(text: str, name: str = "patch") -> str:
    """How the model writes a call with this input."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that calls tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), TOOL_TEMPLATE)))


async def test_a_response_has_the_input(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Beside a message and a call of a function. The response repeats the tools as they were sent."""
    router = await start_http_router(saying(f"so {call_of(PATCH)}\n{WEATHER_CALL}"), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=[PATCH_TOOL, WEATHER], max_output_tokens=400)
    made: Response = await router.openai.responses.create(**asked)
    assert [item.type for item in made.output] == ["message", "custom_tool_call", "function_call"]
    call = ResponseCustomToolCallItem.model_validate(made.output[1].model_dump(), strict=True)
    assert (call.name, call.input, call.status) == ("patch", PATCH, "completed")
    assert call.id.startswith("ctc_") and call.call_id.startswith("call_")
    assert made.tools[0].model_dump(exclude_none=True) == PATCH_TOOL
    grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
    assert allows(grammar, call_of(PATCH)) and not allows(grammar, call_of("*** Begin\n*** End"))


async def test_the_events_of_a_stream(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """An item begins empty, gets its input in pieces, and ends with all of it."""
    group = saying(call_of(PATCH))
    group.hold_after = tokens_until(call_of(PATCH), "Begin")
    router = await start_http_router(group, tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=[FREE], max_output_tokens=400, stream=True)
    events: list[Any] = []
    async for event in await router.openai.responses.create(**asked):
        events.append(event)
        if event.type == "response.custom_tool_call_input.delta":
            group.go()
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in deltas) == PATCH and len(deltas) > 1
    first, last = kinds.index("response.custom_tool_call_input.delta"), len(kinds) - 4
    assert kinds[first - 1] == "response.output_item.added" and events[first - 1].item.input == ""
    assert kinds[last + 1 :] == [
        "response.custom_tool_call_input.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    item = events[-1].response.output[0]
    assert events[last + 1].input == PATCH and events[last + 2].item == item and item.input == PATCH
    assert {event.item_id for event in [*deltas, events[last + 1]]} == {item.id} == {events[first - 1].item.id}


async def test_a_conversation_goes_on(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """From the store, with the items of the output, and with references to them."""
    router = await start_http_router(saying(call_of(PATCH)), tokenizer=model)
    create = router.openai.responses.create
    made = await create(model="tiny", input="hello", tools=[FREE], max_output_tokens=400)
    (call,) = made.output
    assert call.type == "custom_tool_call"
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    parts: Any = {**result, "output": [{"type": "input_text", "text": "done"}]}
    reference: Any = {"type": "item_reference", "id": call.id}
    hello: Any = {"role": "user", "content": "hello"}
    for given, before in (
        ([result], made.id),
        ([hello, call.model_dump(), parts], None),
        ([hello, reference, result], None),
    ):
        await create(model="tiny", input=given, previous_response_id=before, tools=[FREE], max_output_tokens=400)  # type: ignore[arg-type]
        prompt = await router.last_prompt()
        assert "<user>hello<assistant><tool_call>" in prompt and json.dumps({"input": PATCH}) in prompt
        assert prompt.endswith("</tool_call><tool>done")


async def test_choices_of_custom_tools(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """A named one, and a list of allowed ones. The response repeats the choice."""
    router = await start_http_router(saying(json.dumps({"input": PATCH})), tokenizer=model)
    named: Any = {"type": "custom", "name": "patch"}
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=[PATCH_TOOL, WEATHER], max_output_tokens=400)
    made = await router.openai.responses.create(**asked, tool_choice=named)
    assert [item.type for item in made.output] == ["custom_tool_call"]
    assert made.tool_choice.model_dump() == named  # type: ignore[union-attr]
    await router.openai.responses.create(
        **asked, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [named]}
    )
    assert "weather" not in await router.last_prompt()


async def test_a_custom_tool_in_a_namespace(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The model sees both names in one; the call has them as two fields."""
    router = await start_http_router(saying(call_of("x", "files__patch")), tokenizer=model)
    tools: Any = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [FREE, WEATHER]}]
    made = await router.openai.responses.create(model="tiny", input="hello", tools=tools, max_output_tokens=400)
    (call,) = made.output
    assert call.type == "custom_tool_call" and (call.namespace, call.name, call.input) == ("files", "patch", "x")
    history: Any = [{"role": "user", "content": "hello"}, call.model_dump()]
    await router.openai.responses.create(model="tiny", input=history, tools=tools, max_output_tokens=400)
    assert '"name": "files__patch"' in (await router.last_prompt()).rpartition("<assistant>")[2]
