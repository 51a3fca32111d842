"""Requests and messages that are large in different ways. Each would block the event loop for long if it were processed
there."""

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

from coatcheck.proto.stubs.coatcheck_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    TokenIds,
    TokenizeRequest,
)

_CHAT, _COMPLETIONS, _TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_MESSAGE = '{"role":"user","content":"a"}'
_PART = '{"type":"text","text":"a"}'
_CALL = '{"function":{"name":"a"}}'
_HELLO: Final = [{"role": "user", "content": "a"}]
_NESTED: Final = {"a": [{"b": 1}] * 600_000}
_FUNCTION: Final = {"type": "function", "function": {"name": "f", "parameters": _NESTED}}


def _chat(**fields: Any) -> tuple[str, bytes]:
    return _CHAT, json.dumps({"messages": _HELLO, "max_tokens": 1, **fields}).encode()


def _completion(prompt: Any = "a", **fields: Any) -> tuple[str, bytes]:
    return _COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": 1, **fields}).encode()


def _messages(*entries: str) -> bytes:
    return b'{"messages":[' + ",".join(entries).encode() + b"]}"


# What is sent by HTTP: (path, body).
BODIES: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "100,000 messages": lambda: (_CHAT, _messages(*[_MESSAGE] * 100_000)),
    "500,000 messages": lambda: (_CHAT, _messages(*[_MESSAGE] * 500_000)),
    "8,000 messages": lambda: (_CHAT, _messages(*[_MESSAGE] * 8_000)),
    "messages to tokenize": lambda: (_TOKENIZE, _messages(*[_MESSAGE] * 100_000)),
    "a bad message at the end": lambda: (_CHAT, _messages(*[_MESSAGE] * 100_000, '{"role":5}')),
    "text parts": lambda: (_CHAT, _messages('{"role":"user","content":[' + ",".join([_PART] * 500_000) + "]}")),
    "tool calls": lambda: (_CHAT, _messages('{"role":"user","tool_calls":[' + ",".join([_CALL] * 300_000) + "]}")),
    "a long role": lambda: (_CHAT, _messages('{"role":"' + "a" * 20_000_000 + '","content":"a"}')),
    "2 million ids": lambda: _completion([5] * 2_000_000),
    "2 million ids, one bad": lambda: _completion([5] * 1_900_000 + [-1]),
    "a million prompts": lambda: _completion(["a"] * 1_000_000),
    "a million empty prompts": lambda: (_COMPLETIONS, b'{"prompt":[' + b",".join([b"[]"] * 1_000_000) + b"]}"),
    "1,024 prompts": lambda: _completion(["a"] * 1024),
    "1,024 prompts, streamed": lambda: _completion(["a"] * 1024, stream=True),
    "1,024 prompts of 200 ids": lambda: _completion([[5] * 200] * 1024),
    "30 MB of text": lambda: _completion("a b " * 7_500_000),
    "30 MB of escapes": lambda: (_COMPLETIONS, b'{"prompt":"' + b"\\u4e2d" * 5_000_000 + b'"}'),
    "halves of characters": lambda: (_COMPLETIONS, b'{"prompt":"' + b"\\ud83d" * 5_000_000 + b'"}'),
    "biases": lambda: _completion(logit_bias={str(token): 1.0 for token in range(500_000)}),
    "stops": lambda: _completion(stop=["x"] * 1_000_000),
    "stop ids": lambda: _completion(stop_token_ids=[5] * 2_000_000),
    "lists within lists": lambda: (_COMPLETIONS, b'{"prompt":' + b"[" * 900_000 + b"]" * 900_000 + b"}"),
    "objects within objects": lambda: (_COMPLETIONS, b'{"prompt":' + b'{"a":' * 500_000 + b"1" + b"}" * 500_000 + b"}"),
    "tools": lambda: _chat(tools=[{"type": "function", "function": {"name": "f"}}] * 50_000, tool_choice="required"),
    "a tool's parameters": lambda: _chat(tools=[_FUNCTION], tool_choice="required"),
    "a schema": lambda: _chat(response_format={"type": "json_schema", "json_schema": {"schema": _NESTED}}),
    "choices": lambda: _chat(guided_choice=["a"] * 1_000_000),
    "a pattern": lambda: _chat(guided_regex="a" * 30_000_000),
    "template arguments": lambda: _chat(chat_template_kwargs=_NESTED),
    "metadata": lambda: _chat(metadata=_NESTED),
    "a model's name": lambda: _chat(model="a" * 30_000_000),
    "a field's name": lambda: _chat(**{"a" * 30_000_000: 1}),
    "unknown fields": lambda: _completion(**{f"x{number}": 1 for number in range(500_000)}),
    "digits": lambda: (_COMPLETIONS, b'{"prompt":[' + b"1" * 30_000_000 + b"]}"),
    "no JSON at the end": lambda: (_COMPLETIONS, b'{"prompt":"' + b"a\\n" * 10_000_000 + b'"x'),
    "ids to detokenize": lambda: ("/detokenize", json.dumps({"tokens": [5] * 2_000_000}).encode()),
    "tokens with their texts": lambda: (
        _TOKENIZE,
        json.dumps({"prompt": "a b " * 60_000, "return_token_strs": True}).encode(),
    ),
}


def _scored(count: int = 30_000, **fields: Any) -> tuple[str, bytes]:
    return _completion([5] * count, echo=True, logprobs=9, **fields)


# Answers that are large: (path, body), for a context of 131,072 tokens.
ANSWERS: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "30,000 tokens scored": _scored,
    "30,000 tokens scored, streamed": lambda: _scored(stream=True),
    "100,000 tokens scored": lambda: _scored(100_000),
    "100,000 tokens scored, streamed": lambda: _scored(100_000, stream=True),
    "45,000 tokens scored, for four choices": lambda: _scored(45_000, n=4),
    "100,000 tokens scored by prompt_logprobs": lambda: _completion([5] * 100_000, prompt_logprobs=9),
    "1,024 prompts of 200 ids scored": lambda: _completion([[5] * 200] * 1024, echo=True, logprobs=5),
    "100,000 ids returned": lambda: _completion([5] * 100_000, return_token_ids=True, n=8),
    "a long echo for many choices": lambda: _completion([5] * 130_000, echo=True, n=32),
    "tokens": lambda: (_TOKENIZE, json.dumps({"prompt": "a b " * 60_000}).encode()),
    "64 choices with log-probabilities": lambda: _completion(n=64, logprobs=20, max_tokens=100),
}


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _said(content: str = "a", role: str = "user", **fields: Any) -> Chat:
    return Chat(messages=[ChatMessage(role=role, content=content)], **fields)


def _sampled(**fields: Any) -> bytes:
    return GenerateRequest(text="a", sampling=SamplingParams(**fields)).SerializeToString()


_HEALTH: Final = "/grpc.health.v1.Health/Check"
_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

# As ANSWERS, by gRPC.
ANSWERED_MESSAGES: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "100,000 tokens scored by gRPC": lambda: (
        "Generate",
        GenerateRequest(
            token_ids=TokenIds(ids=[5] * 100_000), sampling=SamplingParams(max_tokens=1, prompt_logprobs=9)
        ).SerializeToString(),
    ),
}

# What is sent by gRPC: (method, message).
MESSAGES: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "5 million messages": lambda: ("Generate", _field(5, b"\x0a\x00" * 5_000_000)),
    "500,000 messages": lambda: ("Generate", _field(5, b"\x0a\x00" * 500_000)),
    "30 million ids": lambda: ("Generate", _field(4, _field(1, b"\x05" * 30_000_000))),
    "4 million ids": lambda: ("Generate", _field(4, _field(1, b"\x05" * 4_000_000))),
    "30 MB of text": lambda: ("Generate", GenerateRequest(text="a b " * 7_500_000).SerializeToString()),
    "unknown fields": lambda: ("Generate", b"\xf8\x07\x05" * 2_000_000),
    "300,000 unknown fields": lambda: ("Generate", b"\xf8\x07\x05" * 300_000),
    "biases": lambda: (
        "Generate",
        _field(6, b"".join(_field(10, b"\x08" + _varint(token)) for token in range(500_000))),
    ),
    "stops": lambda: ("Generate", _field(6, b"\x62\x00" * 5_000_000)),
    "stop ids": lambda: ("Generate", _sampled(stop_token_ids=[5] * 4_000_000)),
    "resumed": lambda: ("Generate", b"\x3a\x00" * 500_000),
    "a role": lambda: ("Generate", GenerateRequest(chat=_said(role="a" * 20_000_000)).SerializeToString()),
    "template arguments": lambda: (
        "Generate",
        GenerateRequest(chat=_said(template_arguments='{"a":[' + "[]," * 2_000_000 + "[]]}")).SerializeToString(),
    ),
    "a pattern": lambda: ("Generate", _sampled(structured=StructuredOutput(regex="a" * 20_000_000))),
    "messages to tokenize": lambda: (
        "Tokenize",
        TokenizeRequest(chat=Chat(messages=[ChatMessage(role="user", content="a")] * 8_000)).SerializeToString(),
    ),
    "a name to the health service": lambda: (_HEALTH, _field(1, b"a" * 30_000_000)),
    "unknown fields to the health service": lambda: (_HEALTH, b"\xf8\x07\x05" * 10_000_000),
    "a name to reflection": lambda: (_REFLECTION, _field(4, b"a" * 30_000_000)),
    "unknown fields to reflection": lambda: (_REFLECTION, b"\xf8\x07\x05" * 10_000_000),
    "ids to detokenize": lambda: ("Detokenize", DetokenizeRequest(token_ids=[5] * 250_000).SerializeToString()),
}

# Cases that another one of their table covers, and that take seconds.
_REPEATED_BODIES: Final = {
    "500,000 messages", "messages to tokenize", "text parts", "tool calls", "2 million ids, one bad",
    "a million empty prompts", "1,024 prompts", "1,024 prompts of 200 ids", "30 MB of escapes", "a schema",
}  # fmt: skip
_REPEATED_ANSWERS: Final = {
    "100,000 tokens scored", "100,000 tokens scored, streamed", "45,000 tokens scored, for four choices",
    "100,000 tokens scored by prompt_logprobs", "1,024 prompts of 200 ids scored", "64 choices with log-probabilities",
}  # fmt: skip
_REPEATED_MESSAGES: Final = {"5 million messages", "30 million ids", "template arguments", "a role", "stop ids"}


def _sample(table: Iterable[str], repeated: set[str]) -> list[ParameterSet]:
    """The names of `table` as parameters; the repeated ones run only with `make test-all`."""
    return [pytest.param(name, marks=pytest.mark.full if name in repeated else ()) for name in table]


SAMPLED_BODIES: Final = _sample(BODIES, _REPEATED_BODIES)
SAMPLED_ANSWERS: Final = _sample(ANSWERS, _REPEATED_ANSWERS)
SAMPLED_MESSAGES: Final = _sample(MESSAGES, _REPEATED_MESSAGES)
