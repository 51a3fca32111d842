"""render_chat(): a chat as the prompt text that its model was trained on.

The template comes with a checkpoint and is not trusted, so it runs in jinja's sandbox.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Never

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from coatcheck.proto.errors import InvalidModel, InvalidParameter, InvalidRequest
from coatcheck.proto.json_file import read_json_object
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage
from coatcheck.router.text.conversation import developers_as_system, rewritten

# The template of chats with tools, in a checkpoint that has a second one for them; transformers' path.
TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
_MAX_SOURCE: Final = 1 << 16  # characters of a client's template
# Mistral's own templates refuse ids of tool calls that do not have nine characters, and vLLM's for Mistral those that
# have fewer.
_SHORT_IDS: Final = re.compile(r"length\s*(?:!=|<)\s*9\b")
# Variables that the fields of a Chat set.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


def render_chat(chat: Chat, template: "ChatTemplate | None") -> str:
    """The prompt of a Chat message; slow for a long chat. Raises InvalidRequest."""
    if template is None:
        raise InvalidRequest("this model has no chat template; send the prompt as text or token_ids")
    if chat.chat_template:
        template = template.with_source(chat.chat_template)
    if chat.tools:
        template = template.for_tools
    if not chat.messages:
        raise InvalidRequest("the chat has no messages; give at least one")
    is_continued = chat.continue_final_message
    adds_prompt = not is_continued and (chat.add_generation_prompt or not chat.HasField("add_generation_prompt"))
    tools = [_parse_object("tools", tool) for tool in chat.tools]
    arguments = _parse_object("template_arguments", chat.template_arguments or "{}")
    messages = [_template_message(message, template) for message in chat.messages]
    if not template.knows_developers:
        messages = developers_as_system(messages)
    if is_continued:
        messages[-1] = {**messages[-1], "content": _marked_end(messages[-1]["content"])}
    text = _render_messages(messages, lambda given: template.render(given, adds_prompt, tools, arguments))
    return _cut_at_mark(text) if is_continued else text


def _render_messages(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Renders the messages, then their rewrites (see conversation.py), until a prompt shows every system message.
    Returns that prompt; if no prompt shows them all, the first one that the template accepts. If it accepts none,
    raises RefusedConversation with the template's message about the unchanged messages."""
    refusal: RefusedConversation | None = None
    incomplete: str | None = None
    for given in itertools.chain((messages,), rewritten(messages)):
        try:
            text = render(given)
        except RefusedConversation as error:
            refusal = refusal or error
            continue
        if _shows_system_messages(given, text):
            return text
        incomplete = text if incomplete is None else incomplete
    if incomplete is not None:
        return incomplete
    assert refusal is not None, "at least the messages as they are have been rendered"
    raise refusal


def _shows_system_messages(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Whether the prompt has the text of each system message. vLLM's templates for Alpaca and Baichuan show only the
    last one, without an error. A single system message at the beginning is not checked: a model may know none."""
    if all(message["role"] != "system" for message in messages[1:]):
        return True
    return all(message["content"].strip() in text for message in messages if message["role"] == "system")


# Marks the end of the text that the answer continues, as in transformers. The text itself cannot be searched for: a
# short one, such as "<", also occurs in what the template writes after the message.
_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_HERE "


def _marked_end(content: str) -> str:
    """The content followed by _END_MARK. Raises InvalidRequest if there is no content to continue."""
    if not content.strip():
        raise InvalidRequest(
            "continue_final_message needs a last message with content; give it content, or remove "
            "continue_final_message"
        )
    return content + _END_MARK


def _cut_at_mark(text: str) -> str:
    """The prompt up to the mark. If the template strips contents, spaces before the mark are stripped too. Raises
    InvalidRequest if the template does not show the end of the last message."""
    before, mark, after = text.rpartition(_END_MARK.rstrip())
    if not mark:
        raise InvalidRequest(
            "continue_final_message needs a last message whose content the chat template shows; remove "
            "continue_final_message"
        )
    return before if after.startswith(" ") else before.rstrip()


def _template_message(message: ChatMessage, template: "ChatTemplate") -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
        if not message.content:
            fields["thinking"] = message.reasoning_content  # the name in gpt-oss' template
    if message.tool_call_id:
        fields["tool_call_id"] = template.fit_call_id(message.tool_call_id)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": template.fit_call_id(call.id),
                "type": "function",
                # Parsed, because each template writes the object in the form of its model.
                "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of an earlier call. A model may have written broken JSON or no object, or max_tokens cut it: an
    agent sends that back with the error of its tool, and could not go on if the call were refused. Text that is empty
    or null is a call without arguments, as in vLLM."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"invalid_json": text}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"invalid_json": text}


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be the text of a JSON object, not {text[:80]!r}")
    return value


class RefusedConversation(InvalidRequest):
    """The template refuses the messages. It may accept them rewritten."""


_PROBE: Final = "probe of the chat template"


class ChatTemplate:
    """A model's template with its special tokens. Safe to call from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises InvalidModel if the source does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
        except jinja2.TemplateError as error:
            raise InvalidModel(f"the model's chat template does not compile: {error}") from error
        constants = (constant.value for constant in parsed.find_all(jinja2.nodes.Const))
        self.constants = frozenset(value for value in constants if isinstance(value, str))
        # The names that the template reads, also those that it sets before.
        self.loaded_names = frozenset(one.name for one in parsed.find_all(jinja2.nodes.Name) if one.ctx == "load")
        self.source = source
        self.for_tools = self  # the template of chats with tools; `load` sets another if the model has one
        # The variables that the template reads. Finding them folds the constants of `parsed` into lists.
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        # Whether the template compares roles with "developer".
        self.knows_developers = "developer" in self.constants
        self._special_tokens = special_tokens
        self._has_short_ids = _SHORT_IDS.search(source) is not None

    def fit_call_id(self, call_id: str) -> str:
        """The id of a tool call as the template takes it: nine letters and digits of its hash, where only those are
        allowed. A call and its result keep one id, and so does a conversation that began with another model."""
        if not self._has_short_ids or not call_id or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    @classmethod
    def load(cls, directory: Path, tokenizer_config: dict[str, Any]) -> "ChatTemplate | None":
        """From chat_template.jinja, tokenizer_config.json or chat_template.json in `directory`; None if the model has
        no template. Of several templates the one named "tool_use" is for chats with tools, as in transformers."""
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else tokenizer_config.get("chat_template")
        if not source:  # older multimodal checkpoints have a file of their own
            source = (read_json_object(directory / "chat_template.json") or {}).get("chat_template")
        tool_path = directory / TOOL_TEMPLATE
        for_tools = tool_path.read_text(encoding="utf-8") if tool_path.is_file() else None
        if isinstance(source, list):  # several templates by name
            try:
                named = {entry["name"]: entry["template"] for entry in source}
            except (KeyError, TypeError):
                named = {"": source}  # refused below
            for_tools = for_tools or named.get("tool_use")
            source = named.get("default", next(iter(named.values()), None))
        if not source:
            return None
        if not isinstance(source, str) or not isinstance(for_tools, str | None):
            raise InvalidModel("tokenizer_config.json's chat_template is neither a text nor a list of named texts")
        template = cls(source, special_tokens_of(tokenizer_config))
        if for_tools:
            template.for_tools = cls(for_tools, special_tokens_of(tokenizer_config))
        return template

    def with_source(self, source: str) -> "ChatTemplate":
        """A template of a client with the model's special tokens. Raises InvalidParameter."""
        if len(source) > _MAX_SOURCE:
            raise InvalidParameter("chat_template", f"has {len(source)} characters; the maximum is {_MAX_SOURCE}")
        try:
            return ChatTemplate(source, self._special_tokens)
        except InvalidModel as error:
            raise InvalidParameter("chat_template", f"does not compile: {error.__cause__}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `arguments` that the template does not read have no effect. Raises InvalidRequest for tools
        that the template does not read, and with the template's own message if it refuses the messages."""
        if tools and "tools" not in self.variables:
            raise InvalidRequest("this model's chat template does not support tools; remove tools")
        for name in arguments or ():
            if name in _RESERVED:
                raise InvalidRequest(f"chat_template_kwargs must not set {name!r}, which the request sets; remove it")
        if self._reads_parts_only:
            messages = [{**message, "content": _as_parts(message.get("content"))} for message in messages]
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools or None}
        return self._render({"documents": None, **(arguments or {}), **own})  # `documents` as in transformers

    @cached_property
    def _reads_parts_only(self) -> bool:
        """Whether the template leaves out a content that is a text instead of a list of parts, as those of LLaVA and
        Idefics do. Found out when it is first rendered, where the CPU time of a hostile template is limited."""
        return not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def _shows(self, content: object) -> bool:
        """Whether the prompt has the probe text of a user's message with this content."""
        try:
            messages = [{"role": "user", "content": content}]
            return _PROBE in self._render({"messages": messages, "add_generation_prompt": True})
        except InvalidRequest:
            return False

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            text = self._template.render({**self._special_tokens, **variables})
            text.encode()  # raises for a lone surrogate, which JSON can escape
            return text
        except Exception as error:  # a template is a program, which may also divide by zero or make a text of terabytes
            raise RefusedConversation(f"the model's chat template refuses this conversation: {error}") from error


def special_tokens_of(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens that a tokenizer_config.json names, such as eos_token."""
    named = {name: _token_text(token) for name, token in tokenizer_config.items() if name.endswith("_token")}
    return {name: token for name, token in named.items() if token is not None}


def _as_parts(content: object) -> object:
    """A text as a list of one text part; any other content unchanged."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between `generation` and `endgeneration`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The parameters are those of transformers. jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _token_text(token: object) -> str | None:
    """A special token is given as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
