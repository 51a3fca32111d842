"""Chat templates of text models and of multimodal models get the text of every message."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coatcheck.proto.errors import InvalidModel, InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, ToolCall
from coatcheck.router.text.chat_template import TOOL_TEMPLATE, ChatTemplate, render_chat

# As LLaVA's and Idefics' templates: a content that is a text has no parts, so its text would be missing.
_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}"
    "{% endfor %}{{ ';' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_BOTH = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}\n{% endfor %}"
# As Mistral's: the id of a call and of its result must have nine characters.
_SHORT_IDS = (
    "{% for m in messages %}{% for id in (m.tool_calls | map(attribute='id') if m.tool_calls else [m.tool_call_id]) %}"
    "{% if id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}{{ id }} {% endfor %}{% endfor %}"
)
_CHAT = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (_PARTS, "user: two and two?;assistant: four;assistant: "),
        (_TEXT, "user: two and two?\nassistant: four\n"),
        (_BOTH, "two and two?\nfour\n"),
    ],
)
def test_every_kind_of_template_shows_the_text(source: str, prompt: str) -> None:
    """A template that reads lists of parts gets them; any other gets the text itself."""
    assert ChatTemplate(source, {}).render(_CHAT, True) == prompt


def test_an_empty_content_stays() -> None:
    """A message without a text is rendered too, also by a template that reads parts."""
    assert ChatTemplate(_PARTS, {}).render([{"role": "user", "content": ""}], False) == "user: ;"


def test_the_template_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Older multimodal checkpoints have chat_template.json; tokenizer_config.json comes first."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": _TEXT}))
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None and loaded.source == _TEXT
    loaded = ChatTemplate.load(tmp_path, {"chat_template": _BOTH})
    assert loaded is not None and loaded.source == _BOTH
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(InvalidModel, match="does not hold a JSON object"):
        ChatTemplate.load(tmp_path, {})


@pytest.mark.parametrize("is_file", [False, True])
def test_a_template_of_its_own_for_tools(tmp_path: Path, is_file: bool) -> None:
    """Of Hermes 2 and Command R: a chat with tools has the template "tool_use", any other the default."""
    shows_tools = "{{ tools[0].name }}: {{ messages[0].content }}"
    named = [{"name": "default", "template": _TEXT}, {"name": "tool_use", "template": shows_tools}]
    config = {"chat_template": _TEXT if is_file else named}
    if is_file:
        (tmp_path / TOOL_TEMPLATE).parent.mkdir()
        (tmp_path / TOOL_TEMPLATE).write_text(shows_tools)
    template = ChatTemplate.load(tmp_path, config)
    assert template is not None and template.source == _TEXT
    messages = [ChatMessage(role="user", content="u")]
    assert render_chat(Chat(messages=messages), template) == "user: u\n"
    assert render_chat(Chat(messages=messages, tools=['{"name": "f"}']), template) == "f: u"
    template = ChatTemplate.load(tmp_path, {"chat_template": _TEXT})
    assert template is not None and ("tools" in template.for_tools.variables) == is_file


@pytest.mark.parametrize(("call_id", "shown"), [("aB3dE6gH9", "aB3dE6gH9"), ("call_0123456789abcdef01234567", None)])
def test_a_template_that_wants_ids_of_nine_characters_gets_them(call_id: str, shown: str | None) -> None:
    """Mistral's templates refuse other ids of tool calls, also those that this server makes in OpenAI's form. A call
    and its result keep one id, which depends on nothing else. Other templates get the id as it is."""
    call = ToolCall(id=call_id, name="f", arguments="{}")
    chat = Chat(
        messages=[ChatMessage(role="assistant", tool_calls=[call]), ChatMessage(role="tool", tool_call_id=call_id)]
    )
    text = render_chat(chat, ChatTemplate(_SHORT_IDS, {}))
    first, second = text.split()
    assert first == second and len(first) == 9 and first.isalnum() and shown in (None, first)
    assert render_chat(chat, ChatTemplate(_SHORT_IDS, {})) == text
    assert render_chat(chat, ChatTemplate(_SHORT_IDS.replace("!= 9", "== 0"), {})).split() == [call_id, call_id]


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (_CHATML, {}),
        # Kimi K2's tools.
        ("{{ {'b': [1, 2], 'a': 'é'} | tojson(separators=(',', ':')) }}", {}),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=2) }}{{ {'a': 'é'} | tojson(true) }}", {}),
        ("{{ bos_token }}{{ documents is none }}", {}),
        ("{{ bos_token }}{{ self is defined }}{{ documents[0].text }}",
         {"bos_token": "<b>", "documents": [{"text": "d"}]}),
    ],
)  # fmt: skip
def test_a_plain_conversation_has_the_text_that_transformers_gives_it(source: str, arguments: dict[str, Any]) -> None:
    """Filters, special tokens and variables are those of apply_chat_template."""
    variables: dict[str, Any] = {"bos_token": "<s>", **arguments}
    expected = render_jinja_template([_CHAT], chat_template=source, add_generation_prompt=True, **variables)[0][0]
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(_CHAT, True, [], arguments) == expected


@pytest.mark.parametrize("source", [_CHATML, _CHATML.replace("m.content", "m.content | trim")])
@pytest.mark.parametrize("text", ["<", "n", "<|im_", "end", "four ", " four", "four\n\n"])
def test_a_continued_message_ends_the_prompt(source: str, text: str) -> None:
    """Also a text that the template writes behind each message, such as `<`."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": text}]
    expected = render_jinja_template([messages], chat_template=source, continue_final_message=True)[0][0]
    chat = Chat(
        messages=[ChatMessage(role=message["role"], content=message["content"]) for message in messages],
        continue_final_message=True,
    )
    assert render_chat(chat, ChatTemplate(source, {})) == expected


def test_a_continued_message_that_the_template_leaves_out_is_refused() -> None:
    """Not answered with a prompt without it."""
    chat = Chat(
        messages=[ChatMessage(role="user", content="u"), ChatMessage(role="assistant", content="a")],
        continue_final_message=True,
    )
    with pytest.raises(InvalidRequest, match="whose content the chat template shows"):
        render_chat(chat, ChatTemplate("{{ messages[0].content }}", {}))


@pytest.mark.parametrize("source", ["{{ 1 / messages[0].content | length }}", "{{ 'a' * 10 ** 17 }}"])
def test_an_error_of_the_template_s_own_code_is_a_refusal(source: str) -> None:
    """A division by zero, or a text too large for the memory, is the client's error and not the server's."""
    with pytest.raises(InvalidRequest, match="the model's chat template refuses this conversation"):
        ChatTemplate(source, {}).render([{"role": "user", "content": ""}], True)
