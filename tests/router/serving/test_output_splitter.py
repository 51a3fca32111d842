"""Chat.split_output over gRPC: reasoning and tool calls in fields of their own."""

import json

import grpc
import pytest

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.serving.tool_choice import functions_of, may_constrain_calls
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.openai.scripted_chat import WEATHER, allows, saying, tokens_until
from tests.router.router_under_test import StartRouter
from tests.router.tiny_tokenizer import write_model

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if deep %}<think>{% endif %}{% endif %}{# </think> <tool_call> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ANSWER = f"<think>hm, well</think>\n\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons and calls tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("splitter"), TEMPLATE)))


def asking(*, with_tools: bool = True, split: bool = True, arguments: str = "", **more: object) -> pb.GenerateRequest:
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content="hello")],
        tools=[json.dumps(WEATHER)] if with_tools else [],
        split_output=split,
        template_arguments=arguments,
    )
    sampling = pb.SamplingParams(seed=7, max_tokens=500)
    return pb.GenerateRequest(chat=chat, sampling=sampling, **more)  # type: ignore[arg-type]


async def test_reasoning_and_calls_have_fields(start_router: StartRouter, thinker: TokenizerJson) -> None:
    """Whole and streamed alike: the reasoning, the content, and each call with its name, id and arguments."""
    router = await start_router(saying(ANSWER), tokenizer=thinker)
    (whole,) = (await router.generation.Generate(asking())).choices
    assert (whole.reasoning, whole.text.strip()) == ("hm, well", "Let me see.")
    assert [(call.index, call.name, json.loads(call.arguments)) for call in whole.tool_calls] == [
        (0, "weather", {"city": "Bonn"}),
        (1, "weather", {"city": "Bonn"}),
    ]
    assert len({call.id for call in whole.tool_calls}) == 2
    deltas = [event.delta async for event in router.generation.GenerateStream(asking()) if event.HasField("delta")]
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert "".join(delta.text for delta in deltas) == whole.text
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert [piece.name for piece in pieces if piece.name] == ["weather"] * 2
    assert "".join(piece.arguments for piece in pieces if piece.index == 1) == whole.tool_calls[1].arguments
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)


async def test_the_text_is_whole_unless_it_is_to_be_split(start_router: StartRouter, thinker: TokenizerJson) -> None:
    """Without split_output the text is the model's; without tools calls are content; the prompt may open reasoning."""
    router = await start_router(saying(ANSWER), tokenizer=thinker)
    (plain,) = (await router.generation.Generate(asking(split=False))).choices
    assert (plain.text, plain.reasoning, len(plain.tool_calls)) == (ANSWER, "", 0)
    (no_tools,) = (await router.generation.Generate(asking(with_tools=False))).choices
    assert no_tools.reasoning == "hm, well" and CALL in no_tools.text
    opened = await start_router(saying("hm</think>yes"), tokenizer=thinker)
    (choice,) = (await opened.generation.Generate(asking(arguments='{"deep": true}'))).choices
    assert (choice.reasoning, choice.text) == ("hm", "yes")


async def test_a_resumed_stream_goes_on_where_it_was(start_router: StartRouter, thinker: TokenizerJson) -> None:
    """With the tokens that the client has, the rest of reasoning, content and calls follows, cut anywhere."""
    group = saying(ANSWER)
    holds = [tokens_until(ANSWER, place) for place in ("hm", "Let", "see", "Bonn")]
    group.hold_after = holds.pop(0)
    router = await start_router(group, tokenizer=thinker)
    deltas = []
    async for event in router.generation.GenerateStream(asking()):
        if event.HasField("delta"):
            deltas.append(event.delta)
            group.go(holds.pop(0) if holds else None)
    ids = [token for delta in deltas for token in delta.token_ids]
    assert len(deltas) > 4
    for kept in range(1, len(ids) - 1, 9):
        seen, count = 0, 0
        for delta in deltas:  # the deltas that a client has which has read `kept` tokens
            if count >= kept:
                break
            seen, count = seen + 1, count + len(delta.token_ids)
        if count == len(ids):  # the last delta has many tokens: nothing is left to resume
            break
        resumed = asking(resume=[pb.Resumed(choice=0, token_ids=ids[:count])])
        rest = [event.delta async for event in router.generation.GenerateStream(resumed) if event.HasField("delta")]
        whole = [*deltas[:seen], *rest]
        assert "".join(delta.reasoning for delta in whole) == "hm, well"
        assert "".join(delta.text for delta in whole).strip() == "Let me see."
        pieces = [piece for delta in whole for piece in delta.tool_calls]
        assert [piece.name for piece in pieces if piece.name] == ["weather"] * 2
        assert json.loads("".join(piece.arguments for piece in pieces if piece.index == 1)) == {"city": "Bonn"}


async def test_tool_choice_over_grpc(start_router: StartRouter, thinker: TokenizerJson) -> None:
    """ "required" and a name constrain the output to calls, "none" hides the tools, and calls of strict tools fit their
    schemas; calls come in fields of their own."""
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    # tool_choice, what the model says, and what the grammar allows and refuses
    cases: list[tuple[str, str, str, str]] = [
        ("required", f"<think>hm</think>[{call}, {call}]", f"[{call}, {call}]", "text"),
        ("weather", '<think>hm</think>{"city": "Bonn"}', '{"city": "Bonn"}', "[{"),
        ("auto", f"so <tool_call>\n{call}\n</tool_call>", "only text", '<tool_call>\n{"name": "clock"'),
    ]
    strict = json.dumps({**WEATHER, "function": {**WEATHER["function"], "strict": True}})
    for choice, said, allowed, refused in cases:
        router = await start_router(saying(said), tokenizer=thinker)
        asked = asking()
        asked.chat.tool_choice = choice
        asked.chat.tools[0] = strict
        (made,) = (await router.generation.Generate(asked)).choices
        assert [(one.name, one.arguments) for one in made.tool_calls][:1] == [("weather", '{"city": "Bonn"}')], choice
        grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
        assert allows(grammar, allowed) and not allows(grammar, refused), choice
        if choice == "required":
            asked.chat.parallel_tool_calls = False
            assert len((await router.generation.Generate(asked)).choices[0].tool_calls) == 1
            asked.chat.tool_choice = "none"
            hidden = await router.generation.Generate(asked)
            assert hidden.choices[0].text.startswith("[{") and not hidden.choices[0].tool_calls
            shown = await router.generation.Detokenize(
                pb.DetokenizeRequest(token_ids=router.groups[0].submits[-1].prompt_token_ids)
            )
            assert "[tool" not in shown.text
            counted = await router.generation.Tokenize(pb.TokenizeRequest(chat=asked.chat))
            assert counted.token_ids == router.groups[0].submits[-1].prompt_token_ids


def test_only_chats_whose_calls_may_be_constrained_are_parsed() -> None:
    """No required call and no strict tool: no grammar, and nothing is parsed. However `strict` is written, it is
    found."""
    plain = json.dumps({**WEATHER, "function": {**WEATHER["function"], "description": 'not "strict": false'}})
    strict = json.dumps({**WEATHER, "function": {**WEATHER["function"], "strict": True}})
    spelled = strict.replace('"strict": true', '"\\u0073trict"\n:\ttrue')
    assert functions_of(pb.Chat(tools=[spelled]))[0].strict
    for choice, tools, expected in (
        ("", [plain], False),
        ("auto", [plain, plain], False),
        ("required", [], False),
        ("required", [plain], True),
        ("weather", [plain], True),
        ("auto", [plain, strict], True),
        ("", [strict.replace(" ", "")], True),
        ("", [spelled], True),
    ):
        assert may_constrain_calls(pb.Chat(tools=tools, tool_choice=choice)) is expected, (choice, tools)


async def test_a_tool_choice_that_cannot_be_met_is_refused(start_router: StartRouter, thinker: TokenizerJson) -> None:
    """Each error names the field and what to change."""
    router = await start_router(saying("yes"), tokenizer=thinker)
    schema = pb.StructuredOutput(json_schema="{}")
    wrong = {"function": {"name": "a b", "parameters": {}}}
    for choice, tools, structured, words in (
        ("required", [], None, "tool_choice needs tools"),
        ("clock", [WEATHER], None, "tool_choice names 'clock', which is not among the tools"),
        ("weather", [WEATHER], schema, "does not go with structured"),
        ("required", [WEATHER, WEATHER], None, "two functions named 'weather'"),
        ("required", [wrong], None, "has the name 'a b'"),
        ("required", [{"function": {"name": "f", "parameters": {"$ref": "#/x"}}}], None, "schemas that cannot be"),
    ):
        asked = asking(with_tools=False)
        asked.chat.tool_choice = choice
        asked.chat.tools.extend(map(json.dumps, tools))
        if structured is not None:
            asked.sampling.structured.CopyFrom(structured)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await router.generation.Generate(asked)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not router.groups[0].submits
