"""chat_text(): a Chat message as the one text that its model was trained on.

Pure. It does not know tokens, nor which protocol the conversation came by.
"""

import json
from typing import Any

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage
from coatcheck.router.text.chat_template import ChatTemplate


def chat_text(chat: Chat, template: ChatTemplate | None) -> str:
    """May take long for a long conversation. Raises InvalidRequest."""
    if template is None:
        raise InvalidRequest("this model has no chat template; send the prompt as text or token_ids")
    if not chat.messages:
        raise InvalidRequest("the chat has no messages; give at least one")
    return template.render(
        [_message(message) for message in chat.messages],
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        [_object("tools", tool) for tool in chat.tools],
        _object("template_arguments", chat.template_arguments or "{}"),
    )


def _message(message: ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # An object and not its text: templates write it out as their model knows it.
                "function": {"name": call.name, "arguments": _object("arguments of a tool call", call.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be the text of a JSON object, not {text[:80]!r}")
    return value
