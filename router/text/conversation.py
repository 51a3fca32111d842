"""Rewrites a conversation for a chat template that refuses it, or that leaves out some of its messages.

Agents send what the APIs allow: instructions as "developer", system messages between the others, several messages of
one role in a row. Templates of Qwen 3.5, Gemma 3 and Mistral refuse some of these, and many leave out a role that they
do not know.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

TemplateMessage = dict[str, Any]  # with "role" and "content", and what else templates read
_Messages = list[TemplateMessage]


def developers_as_system(messages: Sequence[TemplateMessage]) -> _Messages:
    """The messages with the role "system" in place of "developer", for a template that does not know developers. If a
    role changes, the system messages at the beginning are merged into one."""
    if all(message["role"] != "developer" for message in messages):
        return list(messages)
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    return _merge_first_systems(renamed)


def rewritten(messages: Sequence[TemplateMessage]) -> Iterator[_Messages]:
    """Yields the conversation after each rewrite of _REWRITES alone, then after the first two together, the first
    three, and so on. A result that is equal to the conversation before is not yielded.

    All texts stay, in their order; only the first system message may move. Single rewrites come first because they
    change the least: more of the prompt equals the prompts of earlier turns, whose blocks are in the prefix cache.
    """
    current = list(messages)
    for rewrite in _REWRITES:
        if (result := rewrite(current)) != current:
            yield result
    for rewrite in _REWRITES:
        result = rewrite(current)
        if result != current:
            current = result
            yield current


def _late_systems_to_user(messages: _Messages) -> _Messages:
    """Merges the system messages at the beginning, and gives later ones the role "user"."""
    merged = _merge_first_systems(messages)
    return [
        {**message, "role": "user"} if index and message["role"] == "system" else message
        for index, message in enumerate(merged)
    ]


def _merge_same_roles(messages: _Messages) -> _Messages:
    """Merges consecutive messages of the user, and of the assistant."""
    return _merge_consecutive(_merge_consecutive(messages, "user"), "assistant")


def _merge_user_into_result(messages: _Messages) -> _Messages:
    """Appends the text of a user's message to the result of a tool right before it."""
    merged: _Messages = []
    for message in messages:
        if message["role"] == "user" and merged and merged[-1]["role"] == "tool":
            merged[-1] = {**merged[-1], "content": _join_texts(merged[-1]["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _merge_system_into_user(messages: _Messages) -> _Messages:
    """Puts the text of the first system message before that of the user's message right after it."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return messages
    return [{**_merge(messages[0], messages[1]), "role": "user"}, *messages[2:]]


def _split_parallel_calls(messages: _Messages) -> _Messages:
    """Gives each tool call a message of the assistant, followed by the result of that call: templates of Llama 3 take
    only one call in a message. Calls stay together unless each has one result, right after the calls, in any order."""
    split: _Messages = []
    index = 0
    while index < len(messages):
        message = messages[index]
        calls = message.get("tool_calls", ())
        results = {one.get("tool_call_id"): one for one in messages[index + 1 : index + 1 + len(calls)]}
        index += 1
        if len(calls) < 2 or len(results) < len(calls) or results.keys() != {call["id"] for call in calls}:
            split.append(message)
            continue
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            split += [{**first, "tool_calls": [call]}, results[call["id"]]]
        index += len(calls)
    return split


_REWRITES: Final[Sequence[Callable[[_Messages], _Messages]]] = (
    _late_systems_to_user, _merge_same_roles, _merge_user_into_result, _merge_system_into_user, _split_parallel_calls,
)  # fmt: skip


def _merge_first_systems(messages: _Messages) -> _Messages:
    """Merges the system messages at the beginning."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*_merge_consecutive(messages[:count], "system"), *messages[count:]]


def _merge_consecutive(messages: _Messages, role: str) -> _Messages:
    merged: _Messages = []
    for message in messages:
        if message["role"] == role and merged and merged[-1]["role"] == role:
            merged[-1] = _merge(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _merge(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    """Both messages as one: their texts with an empty line between, then the calls of both. The result has a name only
    if both have the same: the words of one speaker must not seem to be another's."""
    merged = {**first, **second, "content": _join_texts(first["content"], second["content"])}
    for field in ("reasoning_content", "thinking"):
        if field in first and field in second:
            merged[field] = _join_texts(first[field], second[field])
    if first.get("name") != second.get("name"):
        del merged["name"]
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _join_texts(first: str, second: str) -> str:
    return "\n\n".join(filter(None, (first, second)))
