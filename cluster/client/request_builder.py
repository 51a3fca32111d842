"""Builds a GenerateRequest from a prompt or a conversation and sampling options."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypedDict, TypeGuard

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as pb

LONGEST_TIMEOUT = 365 * 86_400.0  # seconds; gRPC treats a deadline much further away as one in the past

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
    logprob_token_ids: Sequence[int]
    skip_special_tokens: bool
    include_stop: bool
    structured: Grammar


class RequestOptions(SamplingOptions, total=False):
    """Sampling options, and the options of the request itself.

    `cache_salt`: prefix blocks are shared only between requests of one salt. `session_id`: among groups of equal cost,
    all requests of a session use the same one. `priority`: lower values are served first. `retention`: how long the
    prompt's blocks are kept. `timeout`: seconds for the whole request.

    Only for conversations: `tools`: functions in OpenAI's form that the model may call. `tool_choice`: "auto", "none",
    "required", or the name of a function. `template_arguments`: further variables of the chat template. `split_output`:
    whether reasoning and tool calls are in their own fields instead of the text; True by default if there are tools.
    """

    model: str
    request_id: str
    cache_salt: str
    session_id: str
    priority: int
    retention: Retention
    timeout: float | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    template_arguments: Mapping[str, Any]
    split_output: bool


PROMPT_FORM = "a prompt must be one text, or one list of token ids: whole numbers from 0"
_SEVERAL_PROMPTS = "for several prompts give LLM a list of them, or call a client's method once for each"
CONVERSATION_FORM = 'a conversation must be a list of messages such as {"role": "user", "content": "Hello"}'
_MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id")
_POOLINGS = {None: pb.POOLING_UNSPECIFIED, "last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN}
_CHAT_OPTIONS = {"tools", "tool_choice", "template_arguments", "split_output"}
_REQUEST_FIELDS = {"model", "request_id", "cache_salt", "session_id", "priority"}

# (type, what the value must be) of each sampling option that is one number or one switch.
_WHOLE: Final = (Integral, "a whole number")
_NUMBER: Final = (Real, "a number")
_SWITCH: Final = (bool, "True or False")
_SCALAR_FORMS: Final[Mapping[str, tuple[type, str]]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop"), _SWITCH),
}


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
    of_chat = {name: given.pop(name) for name in _CHAT_OPTIONS & given.keys()}
    if of_chat and messages is None:
        raise InvalidRequest(f"{min(of_chat)} is for conversations; call chat or stream_chat")
    request.sampling.CopyFrom(build_sampling(given, sampling))
    try:
        if messages is not None:
            request.chat.CopyFrom(build_chat(messages))
            _set_chat_options(request.chat, of_chat)
        elif isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, bytes | bytearray | Mapping | None):
            raise TypeError
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
    except UnicodeEncodeError:
        raise InvalidRequest("a text has a lone surrogate, which is not a character; remove it") from None
    except (TypeError, ValueError):
        raise InvalidRequest(f"{PROMPT_FORM}; {_SEVERAL_PROMPTS}") from None
    return request


def _set_chat_options(chat: pb.Chat, options: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a value of a wrong type."""
    given = {name: value for name, value in options.items() if value is not None}
    tools = given.get("tools", ())
    if not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidRequest('tools must be a list of functions such as {"type": "function", "function": {...}}')
    try:
        chat.tools.extend(map(json.dumps, tools))
        chat.template_arguments = json.dumps(given["template_arguments"]) if "template_arguments" in given else ""
        chat.tool_choice = given.get("tool_choice", "")
        chat.split_output = given.get("split_output", bool(tools))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"an option of the conversation has a wrong type: {error}") from None


def build_sampling(given: Mapping[str, Any], sampling: SamplingParams | None = None) -> pb.SamplingParams:
    """`sampling` overridden by the options that are not None. Without `sampling` only these options are set.

    Raises InvalidRequest.
    """
    if not isinstance(sampling, SamplingParams | None):
        kind = type(sampling).__name__
        raise InvalidRequest(f"sampling is a {kind}; give one SamplingParams, which holds for every prompt")
    present = {name: value for name, value in given.items() if value is not None}
    structured = present.pop("structured", None)
    if not isinstance(structured, Grammar | None):
        raise InvalidRequest(f"structured is {structured!r}; it must be a coatcheck.Grammar")
    present = {name: _check_option(name, value) for name, value in present.items()}
    # Made for its checks: the errors of SamplingParams say more than those of the message's fields.
    fields = present if structured is None else {**present, "structured": structured}
    checked = dataclasses.replace(sampling or SamplingParams(), **fields)
    if sampling is not None:
        try:
            return checked.to_message()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a value of sampling does not fit its field: {error}") from None
    message = pb.SamplingParams(structured=None if structured is None else structured.to_message())
    for name, value in present.items():
        try:
            message.MergeFrom(pb.SamplingParams(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} is {value!r}, which its field cannot hold: {error}") from None
    return message


def check_timeout(timeout: object) -> None:
    """Raise InvalidRequest unless `timeout` is None or a number of seconds that gRPC can use."""
    if timeout is not None and not (_is_number(timeout, Real) and 0 <= timeout <= LONGEST_TIMEOUT):  # type: ignore[operator]
        allowed = f"a number of seconds from 0 to {LONGEST_TIMEOUT:.0f}, or None for no limit"
        raise InvalidRequest(f"timeout is {timeout!r}; it must be {allowed}")


def _check_option(name: str, value: Any) -> Any:
    """The value of a sampling option as SamplingParams holds it. Raises InvalidRequest for a value of a wrong type."""
    if name in _SCALAR_FORMS:
        kind, form = _SCALAR_FORMS[name]
        if isinstance(value, kind) if kind is bool else _is_number(value, kind):
            return value
    elif name == "stop":
        form = "a text, or a list of texts"
        if isinstance(value, str):
            return (value,)
        items = _as_tuple(value)
        if items is not None and all(isinstance(text, str) for text in items):
            return items
    elif name in ("stop_token_ids", "logprob_token_ids"):
        form = "a list of token ids: whole numbers from 0"
        items = _as_tuple(value)
        if items is not None and all(_is_number(token, Integral) and token >= 0 for token in items):
            return items
    else:
        form = "a mapping from token ids to numbers"
        if isinstance(value, Mapping) and all(
            _is_number(token, Integral) and _is_number(bias, Real) for token, bias in value.items()
        ):
            return dict(value)
    raise InvalidRequest(f"{name} is {value!r}; it must be {form}")


def _is_number(value: object, kind: type) -> bool:
    """Whether `value` is a number of this kind, of Python or of numpy. Python counts True and False as numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _as_tuple(value: object) -> tuple[Any, ...] | None:
    """The items of a list or of another iterable; None for a text, bytes, a mapping, and what has no items."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
        return None
    return tuple(value)


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
                'a tool call must be {"id": "...", "function": {"name": "...", "arguments": "{...}"}}, with text values'
            ) from None
        try:
            chat.messages.add(**texts, tool_calls=calls)
        except TypeError:
            raise InvalidRequest(f"a message's {', '.join(_MESSAGE_TEXTS)} are texts") from None
    return chat


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", ""))


def build_embed_requests(
    prompts: Prompt | Sequence[Prompt],
    pooling: str | None,
    dimensions: int | None,
    normalize: bool,
    cache_salt: str,
) -> list[pb.EmbedRequest]:
    """One EmbedRequest for each prompt. Raises InvalidRequest."""
    if pooling not in _POOLINGS:
        raise InvalidRequest(f"pooling is {pooling!r}; it must be 'last', 'mean' or None")
    options = pb.EmbedRequest(pooling=_POOLINGS[pooling])
    for name, value, form in (
        ("dimensions", dimensions, "a whole number from 1"),
        ("normalize", normalize, "True or False"),
        ("cache_salt", cache_salt, "a text"),
    ):
        try:
            if value is not None:
                setattr(options, name, value)
        except (TypeError, ValueError):
            raise InvalidRequest(f"{name} is {value!r}; it must be {form}") from None
    several = [prompts] if is_one_prompt(prompts) else check_batch(prompts, "embed", PROMPT_FORM)
    requests = []
    for prompt in several:
        made = build_request(prompt)
        request = (
            pb.EmbedRequest(text=made.text) if made.HasField("text") else pb.EmbedRequest(token_ids=made.token_ids)
        )
        request.MergeFrom(options)
        requests.append(request)
    return requests


def is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether `prompts` is one prompt: a text, or a list of token ids."""
    return isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], Integral)
    )


def check_batch(batch: object, taker: str, item_form: str) -> Sequence[Any]:
    """`batch` unchanged. Raises InvalidRequest unless it is a sequence. `taker`: what takes the batch, and
    `item_form`: the form of one item, both for the message."""
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise InvalidRequest(f"{taker} takes one or a list of them, and got {type(batch).__name__}: {item_form}")
    return batch
