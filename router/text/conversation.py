"""Forms of a conversation that chat templates accept, for one that a template refuses or would read wrongly.

Agents send what the APIs allow: instructions as "developer", system messages between the others, several messages of
one role in a row. Templates of Qwen 3.5, Gemma 3 and Mistral refuse some of these, and many leave out a role that they
do not know.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

TemplateMessage = dict[str, Any]  # with "role" and "content", and what else templates read
_Messages = list[TemplateMessage]


def with_known_roles(messages: Sequence[TemplateMessage], source: str) -> _Messages:
    """The messages with "developer" as "system", unless the template's `source` names developers."""
    if "developer" in source or all(message["role"] != "developer" for message in messages):
        return list(messages)
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    return _join_first_system(renamed)


def simpler_forms(messages: Sequence[TemplateMessage]) -> Iterator[_Messages]:
    """Forms with all texts of the conversation: after each step alone, then after the first two steps, the first three,
    and so on. A step alone comes first, so that a template that refuses one thing does not change the others, which
    earlier turns showed as they were. Steps that change nothing are left out. Only the first system message moves."""
    form = list(messages)
    for simplify in _STEPS:
        if (simpler := simplify(form)) != form:
            yield simpler
    for simplify in _STEPS:
        simpler = simplify(form)
        if simpler != form:
            form = simpler
            yield form


def _join_first_system(messages: _Messages) -> _Messages:
    """With the system messages at the beginning in one."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*_join_runs(messages[:count], "system"), *messages[count:]]


def _late_system_as_user(messages: _Messages) -> _Messages:
    """With one system message, the first of all, and those after it as messages of the user."""
    joined = _join_first_system(messages)
    return [
        {**message, "role": "user"} if index and message["role"] == "system" else message
        for index, message in enumerate(joined)
    ]


def _join_equal_roles(messages: _Messages) -> _Messages:
    """With each run of messages of the user, or of the assistant, in one."""
    return _join_runs(_join_runs(messages, "user"), "assistant")


def _system_in_user(messages: _Messages) -> _Messages:
    """With the system message at the beginning of the user's first message."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return messages
    return [{**_joined(messages[0], messages[1]), "role": "user"}, *messages[2:]]


def _user_in_result(messages: _Messages) -> _Messages:
    """With the text of a user's message that follows the result of a tool at the end of that result."""
    found: _Messages = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": _join_texts(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found


def _one_call_each(messages: _Messages) -> _Messages:
    """With a message of the assistant for each tool call, followed by the results of that call: templates of Llama 3
    take no more. The results stand after the calls, in the order of the calls, or the messages stay as they are."""
    found: _Messages = []
    index = 0
    while index < len(messages):
        message = messages[index]
        calls = message.get("tool_calls", ())
        results = messages[index + 1 : index + 1 + len(calls)]
        index += 1
        if len(calls) < 2 or [one.get("tool_call_id") for one in results] != [call["id"] for call in calls]:
            found.append(message)
            continue
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            own = message if number == 0 else {"role": "assistant", "content": ""}
            found += [{**own, "tool_calls": [call]}, result]
        index += len(calls)
    return found


_STEPS: Final[Sequence[Callable[[_Messages], _Messages]]] = (
    _late_system_as_user, _join_equal_roles, _user_in_result, _system_in_user, _one_call_each,
)  # fmt: skip


def _join_runs(messages: _Messages, role: str) -> _Messages:
    found: _Messages = []
    for message in messages:
        if message["role"] == role and found and found[-1]["role"] == role:
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(first: TemplateMessage, second: TemplateMessage) -> TemplateMessage:
    """Both messages as one: texts one after the other, then the calls of both. The joined message has a name only if
    both have the same: one speaker must not get the words of another."""
    joined = {**first, **second, "content": _join_texts(first["content"], second["content"])}
    for field in ("reasoning_content", "thinking"):
        if field in first and field in second:
            joined[field] = _join_texts(first[field], second[field])
    if first.get("name") != second.get("name"):
        del joined["name"]
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _join_texts(first: str, second: str) -> str:
    return "\n\n".join(filter(None, (first, second)))
