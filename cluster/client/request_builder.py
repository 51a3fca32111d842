"""Builds a GenerateRequest from a prompt or a conversation and sampling options."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as pb

# A text, or token ids.
Prompt = str | Sequence[int]
# Messages as OpenAI's clients write them: {"role": "user", "content": "..."}.
Conversation = Sequence[Mapping[str, Any]]


class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams, each optional. The server fills a missing field from the model's
    generation_config.json, or else from the field's own default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    include_stop: bool
    structured: Grammar


class RequestOptions(SamplingOptions, total=False):
    """Sampling options, and the options of the request itself.

    `cache_salt`: prefix blocks are shared only between requests of one salt. `session_id`: among groups of equal cost,
    all requests of a session use the same one. `priority`: lower values are served first. `retention`: how long the
    prompt's blocks are kept. `timeout`: seconds for the whole request.
    """

    model: str
    request_id: str
    cache_salt: str
    session_id: str
    priority: int
    retention: Retention
    timeout: float | None


PROMPT_FORM = "a prompt must be one text, or one list of token ids: whole numbers from 0"
CONVERSATION_FORM = 'a conversation must be a list of messages such as {"role": "user", "content": "Hello"}'
_MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id")
_REQUEST_FIELDS = {"model", "request_id", "cache_salt", "session_id", "priority"}


def build_request(
    prompt: Prompt | None = None,
    messages: Conversation | None = None,
    sampling: SamplingParams | None = None,
    options: RequestOptions | SamplingOptions | None = None,
) -> pb.GenerateRequest:
    """The request for `prompt`, or for `messages` by the model's chat template.

    `sampling` sets every field; `options` overrides single ones. Raises InvalidRequest for a value that every
    server refuses, a value of a wrong type, and an unknown option.
    """
    given: dict[str, Any] = {**(options or {})}
    if unknown := given.keys() - RequestOptions.__annotations__.keys():
        known = ", ".join(RequestOptions.__annotations__)
        raise InvalidRequest(f"there is no option {min(unknown)}; the options are {known}")
    request = pb.GenerateRequest()
    for name in _REQUEST_FIELDS & given.keys():
        value = given.pop(name)
        try:
            request.MergeFrom(pb.GenerateRequest(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} is {value!r}, which its field cannot hold: {error}") from None
    if (retention := given.pop("retention", None)) is not None:
        if not isinstance(retention, Retention):
            raise InvalidRequest(f"retention is {retention!r}; it must be a coatcheck.proto.retention.Retention")
        request.retention.CopyFrom(retention.to_message())
    request.sampling.CopyFrom(build_sampling(given, sampling))
    try:
        if messages is not None:
            request.chat.CopyFrom(build_chat(messages))
        elif isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, bytes | Mapping | None):
            raise TypeError
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds half of a surrogate pair, which is no character; leave it out") from None
    except (TypeError, ValueError):
        raise InvalidRequest(f"{PROMPT_FORM}; for several prompts call the method once for each") from None
    return request


def build_sampling(given: Mapping[str, Any], sampling: SamplingParams | None = None) -> pb.SamplingParams:
    """`sampling` overridden by the options that are not None. Without `sampling` only these options are set.

    Raises InvalidRequest.
    """
    if not isinstance(sampling, SamplingParams | None):
        kind = type(sampling).__name__
        raise InvalidRequest(f"sampling is a {kind}; give one SamplingParams, which holds for every prompt")
    present = {name: value for name, value in given.items() if value is not None}
    if isinstance(stop := present.get("stop"), str):
        present["stop"] = (stop,)
    structured = present.get("structured")
    if not isinstance(structured, Grammar | None):
        raise InvalidRequest(f"structured is {structured!r}; it must be a coatcheck.Grammar")
    try:
        for name in ("stop", "stop_token_ids"):
            if name in present:
                present[name] = tuple(present[name])
        if "logit_bias" in present:
            present["logit_bias"] = dict(present["logit_bias"])
        checked = dataclasses.replace(sampling or SamplingParams(), **present)
        if sampling is not None:
            return checked.to_message()
        if structured is not None:
            present["structured"] = structured.to_message()
        return pb.SamplingParams(**present)
    except TypeError as error:
        raise InvalidRequest(f"a sampling option cannot be used: {error}") from None
    except ValueError as error:
        raise InvalidRequest(f"a number does not fit its field: {error}") from None


def build_chat(messages: Conversation) -> pb.Chat:
    """The conversation as a message. Raises InvalidRequest for an unknown key, or a value of a wrong type."""
    chat = pb.Chat()
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not (is_list and all(isinstance(message, Mapping) for message in messages)):
        raise InvalidRequest(CONVERSATION_FORM)
    for message in messages:
        if unknown := set(message) - {*_MESSAGE_TEXTS, "tool_calls"}:
            raise InvalidRequest(f"a message has the unknown key {min(unknown)!r}")
        texts = {name: message[name] for name in _MESSAGE_TEXTS if message.get(name)}
        try:
            calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
        except (KeyError, TypeError, AttributeError):
            raise InvalidRequest(
                'a tool call is {"id": "...", "function": {"name": "...", "arguments": "{...}"}}, with texts alone'
            ) from None
        try:
            chat.messages.add(**texts, tool_calls=calls)
        except TypeError:
            raise InvalidRequest(f"a message's {', '.join(_MESSAGE_TEXTS)} are texts") from None
    return chat


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", ""))
