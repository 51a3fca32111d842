"""Conversations as agents send them, with templates that refuse some of their forms."""

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, ToolCall
from coatcheck.router.text.chat_template import ChatTemplate, render_chat

# Each shows all messages in their order. What it refuses is what the templates of the models do that it is named after.
SHOWN = (
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments.n }}]"
    "{% endfor %}{% endfor %}"
)
QWEN = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
) + SHOWN
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
) + SHOWN
LLAMA = (
    "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
) + SHOWN
SILENT = "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}" + SHOWN
# As vLLM's for Alpaca: only the last system message is shown, and the others are left out without an error.
LAST_SYSTEM = (
    "<system>{{ (messages | selectattr('role', 'equalto', 'system') | list | last).content }}"
    "{% for m in messages if m.role != 'system' %}"
) + SHOWN
KNOWING = "{% if messages[0].role == 'developer' %}{% endif %}{% for m in messages %}" + SHOWN
# Has the word, but compares no role with it.
NAMING = "{# developer #}Made by a developer.{% for m in messages if m.role in ('system', 'user') %}" + SHOWN


def said(role: str, content: str = "", calls: int = 0, result_of: str = "") -> ChatMessage:
    made = [ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(calls)]
    return ChatMessage(role=role, content=content, tool_calls=made, tool_call_id=result_of)


def prompt_of(source: str, *messages: ChatMessage) -> str:
    return render_chat(Chat(messages=messages), ChatTemplate(source, {}))


LATE = [said("system", "s"), said("user", "u"), said("assistant", "a"), said("system", "t"), said("user", "v")]
AFTER_RESULT = [said("user", "u"), said("assistant", calls=1), said("tool", "r", result_of="c0"), said("user", "v")]
PARALLEL = [
    said("user", "u"), said("assistant", "a", calls=2), said("tool", "r", result_of="c0"),
    said("tool", "s", result_of="c1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "messages", "shown"),
    [
        (SILENT, [said("developer", "d"), said("user", "u")], "<system>d<user>u"),
        (SILENT, [said("system", "s"), said("developer", "d"), said("user", "u")], "<system>s\n\nd<user>u"),
        (KNOWING, [said("developer", "d"), said("user", "u")], "<developer>d<user>u"),
        (NAMING, [said("developer", "d"), said("user", "u")], "Made by a developer.<system>d<user>u"),
        (SILENT, LATE, "<system>s<user>u<assistant>a<system>t<user>v"),
        (QWEN, LATE, "<system>s<user>u<assistant>a<user>t<user>v"),
        (QWEN, [said("system", "s"), said("system", "t"), said("user", "u")], "<system>s\n\nt<user>u"),
        (GEMMA, LATE, "<user>s\n\nu<assistant>a<user>t\n\nv"),
        (GEMMA, [said("user", "u"), said("user", "v")], "<user>u\n\nv"),
        (GEMMA, [said("user", "u"), said("assistant", "a"), said("assistant", "b")], "<user>u<assistant>a\n\nb"),
        (GEMMA, AFTER_RESULT, "<user>u<assistant>[f0]<tool>r\n\nv"),
        (SILENT, AFTER_RESULT, "<user>u<assistant>[f0]<tool>r<user>v"),
        (LLAMA, PARALLEL, "<user>u<assistant>a[f0]<tool>r<assistant>[f1]<tool>s"),
        (LLAMA, [*PARALLEL[:2], *PARALLEL[:1:-1]], "<user>u<assistant>a[f0]<tool>r<assistant>[f1]<tool>s"),
        (SILENT, PARALLEL, "<user>u<assistant>a[f0][f1]<tool>r<tool>s"),
        (LAST_SYSTEM, [said("system", "first"), *LATE[1:]], "<system>first<user>u<assistant>a<user>t<user>v"),
        (
            LLAMA,
            LATE + PARALLEL,
            "<system>s<user>u<assistant>a<system>t<user>v<user>u<assistant>a[f0]<tool>r<assistant>[f1]<tool>s",
        ),
    ],
)
def test_a_refused_conversation_is_rendered_in_a_simpler_form(
    source: str, messages: list[ChatMessage], shown: str
) -> None:
    """Every text is in the prompt. A template that accepts the conversation gets it as it was sent, but for developers
    that it does not know."""
    assert prompt_of(source, *messages) == shown


def test_a_late_system_message_does_not_change_what_stands_before(subtests: pytest.Subtests) -> None:
    """So that the next turn of an agent finds the blocks of this one in the cache."""
    for source in (QWEN, GEMMA):
        with subtests.test(source=source):
            shorter = prompt_of(source, *LATE[:3])
            assert prompt_of(source, *LATE).startswith(shorter)


def test_joined_messages_keep_their_calls_and_reasoning() -> None:
    """Two messages of the assistant become one with the calls and the reasoning of both."""
    messages = [
        said("user", "u"),
        ChatMessage(role="assistant", reasoning_content="x", tool_calls=[ToolCall(id="a", name="f", arguments="{}")]),
        ChatMessage(role="assistant", reasoning_content="y", tool_calls=[ToolCall(id="b", name="g", arguments="{}")]),
    ]
    source = GEMMA.replace("{{ m.content }}", "({{ m.reasoning_content }}){{ m.content }}")
    assert prompt_of(source, *messages) == "<user>()u<assistant>(x\n\ny)[f][g]"


def test_joined_messages_of_two_speakers_have_no_name() -> None:
    """The words of one are not said to be the other's; a name that both have stays."""
    source = GEMMA.replace("<{{ m.role }}>", "<{{ m.role }} {{ m.name }}>")
    ann, bob = (ChatMessage(role="user", content=name, name=name) for name in ("ann", "bob"))
    assert prompt_of(source, ann, bob) == "<user >ann\n\nbob"
    assert prompt_of(source, ann, ann) == "<user ann>ann\n\nann"
    assert prompt_of(source, ann, said("user", "x")) == "<user >ann\n\nx"


def test_what_no_form_mends_is_refused_with_the_template_s_words() -> None:
    """The error is that of the conversation as it was sent."""
    with pytest.raises(InvalidRequest, match="refuses this conversation: Conversation roles must alternate"):
        prompt_of(GEMMA, said("assistant", "a"), said("user", "u"))
    with pytest.raises(InvalidRequest, match="single tool-calls"):
        prompt_of(LLAMA, said("user", "u"), said("assistant", calls=2), said("tool", "r", result_of="c1"))
