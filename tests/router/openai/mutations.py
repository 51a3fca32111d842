"""Valid request bodies with mutations: a value is replaced, a field is dropped or added, or bytes are changed."""

import copy
import json
import math
import random
from typing import Any

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {
        "model": "tiny", "prompt": "a fox", "max_tokens": 3, "temperature": 0.5, "n": 2, "stop": ["x"], "seed": 1,
        "logit_bias": {"5": 1.5}, "logprobs": 2, "echo": True, "stream": False, "top_k": 5, "user": "me",
    }),
    ("/v1/completions", {
        "prompt": [[300, 301], [302]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
        "priority": 1, "cache_salt": "s", "min_p": 0.1, "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 1,
    }),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_json": {"type": "array", "items": {"type": "null"}}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[a-z]+"}}),
    ("/v1/chat/completions", {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [
            {"type": "text", "text": "hi"}]}], "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 1,
        "response_format": {"type": "json_object"}, "metadata": {"a": "b"}, "stream": True,
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }),
    ("/v1/responses", {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                  {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
                  {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
        "max_output_tokens": 2, "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "none", "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
    }),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                     {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
    }),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 4, "truncate_prompt_tokens": 3}),
    ("/v2/embed", {"texts": ["a", "b"], "embedding_types": ["float", "int8"], "max_tokens": 3, "truncate": "NONE"}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/tokenize", {"prompt": "a fox", "add_special_tokens": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [300, 301, 302]}),
]  # fmt: skip
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**64, -(2**63), 1e308, math.nan, math.inf, -0.5, 0.5,
    "", "x", "\x00", "\ud800", "🙂" * 50, "a" * 5000,
    [], [[]], {}, [1], ["a"], {"a": 1}, [None], "NaN", "(", "start: /a/", '{"type": "object"}', [-1], [[300], "a"],
]  # fmt: skip


def mutated(dice: random.Random) -> tuple[str, bytes]:
    """A path and a mutated body for it."""
    path, good = dice.choice(GOOD)
    body = json.loads(json.dumps(good))
    for _ in range(dice.randint(1, 3)):
        _change(body, dice)
    data = bytearray(json.dumps(body).encode())
    if dice.random() < 0.25:
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data) + 1)
            data[place : place + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 2))
    return path, bytes(data)


def _junk(dice: random.Random) -> Any:
    return copy.deepcopy(dice.choice(JUNK))


def _change(node: Any, dice: random.Random) -> None:
    places = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not places:
        return
    place = dice.choice(places)
    if isinstance(node[place], dict | list) and node[place] and dice.random() < 0.6:
        _change(node[place], dice)
    elif dice.random() < 0.2:
        del node[place]
    elif dice.random() < 0.1 and isinstance(node, dict):
        node[dice.choice(["bogus", "suffix", "best_of", "function_call", "top_a"])] = _junk(dice)
    else:
        node[place] = _junk(dice)
