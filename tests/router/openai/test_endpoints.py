"""The other endpoints, and requests to none: each gets its status and an error in OpenAI's form."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.config import MESSAGE_BYTES, RouterConfig
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.access.key_holders import EYES, OPS, SEARCH, write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import HELLO
from tests.router.tiny_tokenizer import TEMPLATE, byte_level_tokenizer, write_model


async def test_the_model_is_listed(start_http_router: StartHttpRouter) -> None:
    """/v1/models lists the served model, /v1/models/NAME describes it; another name is 404."""
    router = await start_http_router(FakeGroup())
    (listed,) = (await router.openai.models.list()).data
    assert (listed.id, listed.to_dict()["max_model_len"]) == ("tiny", 256)
    assert (await router.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        await router.openai.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as missing:
        await router.openai.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


async def test_text_becomes_tokens_and_back(start_http_router: StartHttpRouter) -> None:
    """/tokenize and /detokenize undo each other, and a chat is counted with its template."""
    router = await start_http_router(FakeGroup())
    _, _, text = await router.request("POST", "/tokenize", {"prompt": "the lazy dog", "return_token_strs": True})
    got = json.loads(text)
    assert got["count"] == len(got["tokens"]) and "".join(got["token_strs"]) == "the lazy dog"
    _, _, text = await router.request("POST", "/detokenize", {"tokens": got["tokens"]})
    assert json.loads(text) == {"prompt": "the lazy dog"}
    _, _, text = await router.request("POST", "/tokenize", {"messages": [{"role": "user", "content": "the lazy dog"}]})
    assert json.loads(text)["count"] > got["count"]


async def test_health_follows_the_groups(start_http_router: StartHttpRouter) -> None:
    """/health is 200 while a group serves and 503 when none does."""
    router = await start_http_router(FakeGroup())
    assert (await router.request("GET", "/health"))[0] == 200
    await router.groups[0].kill()
    await router.wait_for_groups(0)
    assert (await router.request("GET", "/health"))[0] == 503
    error = await router.expect_refusal("/v1/completions", {"prompt": "a"}, 503)
    assert error["type"] == "server_error" and "no worker group" in error["message"]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("NaN", "the number NaN; send finite numbers"),
        ("-Infinity", "the number -Infinity; send"),
        ("1e999", "the number 1e999; send"),
        (f"{'[' * 300}{']' * 300}", "nested too deeply"),
        (f"{'[' * 930}{']' * 930}", "nested too deeply"),
        (f'"{"[" * 300}"', None),
        (f"{'[' * 200}{']' * 200}", None),
    ],
)
@pytest.mark.parametrize("padding", [0, 300_000])
async def test_what_json_cannot_hold_is_refused(
    start_http_router: StartHttpRouter, sent: str, words: str | None, padding: int
) -> None:
    """A value that could not be encoded again is refused before it is used, in a short body and in a long one. The
    response of /v1/responses repeats its tools."""
    router = await start_http_router(FakeGroup())
    tool = f'{{"type": "function", "name": "f", "parameters": {{"default": {sent}}}}}'
    body = f'{{"input": "hi", "max_output_tokens": 1, "tool_choice": "none", "tools": [{tool}]}}' + " " * padding
    status, _, text = await router.request("POST", "/v1/responses", body.encode())
    assert status == (400 if words else 200), text
    assert words is None or words in json.loads(text)["error"]["message"]


async def test_metrics_are_prometheus_text(start_http_router: StartHttpRouter) -> None:
    """/metrics has each group's counts under its name."""
    router = await start_http_router(FakeGroup())
    status, headers, text = await router.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert 'coatcheck_group_running_sequences{group="g0"} 0' in text


async def test_a_request_may_bring_its_id(start_http_router: StartHttpRouter) -> None:
    """X-Request-Id is the id in the answer and at the group; an id that is not safe to log is replaced."""
    group = FakeGroup()
    router = await start_http_router(group)
    body = {"prompt": "a", "max_tokens": 1}
    _, headers, text = await router.request("POST", "/v1/completions", body, {"x-request-id": "mine"})
    assert headers["x-request-id"] == "mine"
    assert json.loads(text)["id"] == "cmpl-mine" and group.submits[0].request_id == "mine"
    _, _, text = await router.request(
        "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"x-request-id": "a b"}
    )
    assert json.loads(text)["id"] != "cmpl-a b"


DEEP = b'{"prompt":' + b"[" * 200_000
BAD: dict[str, tuple[str, Any, int, str]] = {
    "no such path": ("/v2/completions", {}, 404, "unknown endpoint"),
    "no JSON": ("/v1/completions", b"{", 400, "not JSON"),
    "nothing": ("/v1/completions", b"", 400, "JSON object"),
    "no object": ("/v1/completions", [1], 400, "JSON object"),
    "too deep": ("/v1/completions", DEEP, 400, "nested too deeply"),
    "no UTF-8": ("/v1/completions", b'{"prompt":"\xff"}', 400, "not UTF-8"),
    "long number": ("/v1/completions", b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", 400, "too many digits"),
    "half a name": ("/v1/completions", {"prompt": "a", "model": "\ud800"}, 400, "surrogate"),
    "half a field": ("/v1/completions", {"prompt": "a", "\ud800": 1}, 400, "unicode"),
    "no prompt": ("/v1/completions", {}, 400, "prompt is missing"),
    "prompt null": ("/v1/completions", {"prompt": None}, 400, "prompt is missing"),
    "prompt empty": ("/v1/completions", {"prompt": ""}, 400, "prompt is empty"),
    "prompt of none": ("/v1/completions", {"prompt": []}, 400, "prompt is empty"),
    "empty in a batch": ("/v1/completions", {"prompt": ["a", ""], "stream": True}, 400, "prompt is empty"),
    "ids outside": ("/v1/completions", {"prompt": [5, 700]}, 400, "token id 700"),
    "negative id": ("/v1/completions", {"prompt": [-1]}, 400, "greater than or equal to 0"),
    "mixed batch": ("/v1/completions", {"prompt": ["a", 3]}, 400, "prompt"),
    "too many": ("/v1/completions", {"prompt": ["a"] * 1025}, 400, "the maximum is 1024"),
    "unknown field": ("/v1/completions", {"prompt": "a", "bogus": 1}, 400, "Unknown parameter 'bogus'; remove it"),
    "field of another endpoint": (
        "/v1/completions", {"prompt": "a", "max_completion_tokens": 1}, 400, "Unknown parameter"),
    "suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "Unsupported parameter 'suffix'; remove it"),
    "best_of": ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of is 3"),
    "best_of in a chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "best_of": 3}, 400, "best_of is 3"),
    "biases of no tokens": (
        "/v1/completions", {"prompt": "a", "logit_bias": {"x": 1, "3": 1, "y": 1}}, 400,
        "not token ids written as strings: 'x', 'y'"),
    "bias too large": ("/v1/completions", {"prompt": "a", "logit_bias": {"3": 1e9}}, 400, "logit_bias[3]"),
    "logprobs": ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "from 0 to 20"),
    "max_tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 10**12}, 400, "max_tokens"),
    "no max_tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "at least 1"),
    "n": ("/v1/completions", {"prompt": "a", "n": 65}, 400, "n is 65"),
    "infinite": ("/v1/completions", b'{"prompt":"a","temperature":Infinity}', 400, "finite"),
    "not a number": ("/v1/completions", b'{"prompt":"a","top_p":NaN}', 400, "finite"),
    "usage unstreamed": ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options is for"),
    "answers of many log-probabilities": (
        "/v1/completions", {"prompt": ["a"] * 200, "logprobs": 5, "n": 64, "max_tokens": 100}, 400,
        "could have 7,680,000 log-probabilities"),
    "many scored prompts": (
        "/v1/completions", {"prompt": [[5] * 200] * 100, "prompt_logprobs": 5, "n": 64, "max_tokens": 1}, 400,
        "could have 7,680,000 log-probabilities"),
    "prompt scores": ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "does not go"),
    "many fields": ("/v1/completions", {f"k{n}": 1 for n in range(20_000)}, 400, "has 20000 fields"),
    "many biases": ("/v1/completions", {"logit_bias": dict.fromkeys(map(str, range(20_000)))}, 400, "20000"),
    "many nothings": ("/v1/completions", {"prompt": [[]] * 100_000}, 400, "the maximum is 1024"),
    "many values": ("/v1/completions", b'{"prompt":[' + b"1," * (1 << 21) + b"1]}", 413, "values; send less"),
    "nothing to tokenize": ("/tokenize", {}, 400, "either prompt or messages"),
    "both to tokenize": ("/tokenize", {"prompt": "a", "messages": []}, 400, "either prompt or messages"),
    "ids to read": ("/detokenize", {"tokens": [10**6]}, 400, "outside the vocabulary"),
    "schema": (
        "/v1/completions", {"prompt": "a", "guided_json": {"type": "strin"}}, 400, "guided_json cannot be compiled"),
    "schema text": ("/v1/completions", {"prompt": "a", "guided_json": "{"}, 400, "guided_json cannot be compiled"),
    "no schema": (
        "/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "schema is missing"),
    "regex": ("/v1/completions", {"prompt": "a", "guided_regex": "("}, 400, "guided_regex cannot be compiled"),
    "grammar": ("/v1/completions", {"prompt": "a", "guided_grammar": "root ::= x"}, 400, "cannot be compiled"),
    "lark": ("/v1/completions", {"prompt": "a", "guided_grammar": "start: x"}, 400, "guided_grammar cannot"),
    "choices": ("/v1/completions", {"prompt": "a", "guided_choice": []}, 400, "guided_choice must be"),
    "two kinds": (
        "/v1/completions", {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, 400, "several fields ask for"),
    "grammar for ever": (
        "/v1/completions", {"prompt": "a", "guided_regex": "a", "ignore_eos": True}, 400, "ignore_eos is True"),
    "huge schema": ("/v1/completions", {"prompt": "a", "guided_regex": "a" * 300_000}, 400, "it must be shorter"),
    "tag": (
        "/v1/completions", {"prompt": "a", "response_format": {"type": "structural_tag"}}, 400, "response_format"),
}  # fmt: skip


PARAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"logit_bias": {"3": 1e9}}, "logit_bias"),
    ("/v1/chat/completions", {"stop_token_ids": [10**6]}, "stop_token_ids"),
    ("/v1/chat/completions", {"top_p": 2}, "top_p"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/completions", {"logprobs": 21}, "logprobs"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"stop": ["a"] * 70}, "stop"),
    ("/v1/completions", {"stream_options": {}}, "stream_options"),
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/chat/completions", {"messages": None}, "messages"),
    ("/v1/completions", {"guided_regex": "("}, "guided_regex"),
    ("/v1/completions", {"regex": " "}, "regex"),
    ("/v1/completions", {"structured_outputs": {"json": {"$ref": "#/x"}}}, "structured_outputs.json"),
    ("/v1/completions", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}}},
        "text.format.schema",
    ),
    ("/v1/chat/completions", {"messages": [{"role": None, "content": "a"}]}, "messages.0.role"),
]


async def test_param_is_the_field_that_was_sent(start_http_router: StartHttpRouter) -> None:
    """`param` and the message name the field of the body, also if it has another name inside."""
    router = await start_http_router(FakeGroup())
    least: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }
    for path, body, param in PARAMS:
        error = await router.expect_refusal(path, least[path] | body)
        assert error["param"] == param and error["message"].startswith(param), (body, error)


async def test_bad_requests_say_what_to_change(start_http_router: StartHttpRouter) -> None:
    """Each gets its status and a helpful message, reaches no group, and leaves no request open."""
    group = FakeGroup()
    router = await start_http_router(group)
    for case, (path, body, status, words) in BAD.items():
        error = await router.expect_refusal(path, body, status)
        assert any(word in error["message"] for word in words.split("|")), (case, error)
        assert set(error) == {"message", "type", "param", "code"}
        assert router.server.traffic.active == 0, case
    assert len(group.submits) <= 1  # of a batch whose other prompt is bad


@pytest.mark.parametrize("kind", ["", "text/plain", "application/xml", "application/a/b+json", "+json"])
async def test_a_body_of_another_content_type_is_refused(start_http_router: StartHttpRouter, kind: str) -> None:
    """The error has OpenAI's form. A JSON type with parameters or a suffix is accepted."""
    router = await start_http_router(FakeGroup())
    body = {"prompt": "a", "max_tokens": 1}
    status, _, text = await router.request("POST", "/v1/completions", body, {"content-type": kind})
    assert status == 400 and "must be a JSON object" in json.loads(text)["error"]["message"]
    for accepted in ("Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert (await router.request("POST", "/v1/completions", body, {"content-type": accepted}))[0] == 200


async def test_the_wrong_method_is_405(start_http_router: StartHttpRouter) -> None:
    """GET on an endpoint for POST is 405 with the header allow."""
    router = await start_http_router(FakeGroup())
    status, headers, text = await router.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST") and json.loads(text)["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_long_is_413(start_http_router: StartHttpRouter, declared: bool) -> None:
    """Whether its length is declared or not; the server serves the next request."""
    router = await start_http_router(FakeGroup())
    body = b'{"prompt":"' + b"x" * MESSAGE_BYTES + b'"}'
    headers = {} if declared else {"transfer-encoding": "chunked"}
    if not declared:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    status, _, text = await router.request("POST", "/v1/completions", body, headers)
    assert status == 413 and f"{MESSAGE_BYTES} bytes" in json.loads(text)["error"]["message"]
    assert (await router.request("GET", "/health"))[0] == 200


async def test_a_taken_port_is_refused(start_http_router: StartHttpRouter, tokenizer: TokenizerJson) -> None:
    """The error names the address and what to do."""
    router = await start_http_router(FakeGroup())
    port = int(router.http_address.rpartition(":")[2])
    second = Router(RouterConfig(model="tiny", http_port=port), tokenizer)
    with pytest.raises(InvalidConfig, match=f"{port} for HTTP: .*choose another port"):
        await second.start()
    await second.stop()


async def test_an_answer_is_not_held_back(start_http_router: StartHttpRouter) -> None:
    """Connections are served without Nagle's algorithm, which would hold every second write back for 40 ms."""
    router = await start_http_router(FakeGroup())
    clock, seconds = asyncio.get_running_loop().time, []
    for _ in range(8):
        began = clock()
        await router.openai.models.list()  # on one connection
        seconds.append(clock() - began)
    assert min(seconds[1:]) < 0.03


async def test_pages_of_a_named_origin_may_call(start_http_router: StartHttpRouter) -> None:
    """A preflight request needs no key, and responses name the origin; pages of other origins get no permission, nor
    does any page without the setting."""
    origin = "https://chat.example.com"
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    router = await start_http_router(FakeGroup(), cors_origins=(origin,))
    status, headers, _ = await router.request("OPTIONS", "/v1/chat/completions", None, asked)
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    assert "x-api-key" in headers["access-control-allow-headers"]
    status, headers, _ = await router.request("GET", "/v1/models", None, {"origin": origin})
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    status, headers, _ = await router.request("GET", "/v1/models", None, {"origin": "https://other.example.com"})
    assert status == 200 and "access-control-allow-origin" not in headers
    closed = await start_http_router(FakeGroup())
    status, headers, _ = await closed.request("GET", "/v1/models", None, {"origin": origin})
    assert status == 200 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a/b", "https://*.example.com", ""])
def test_an_origin_is_checked(origin: str) -> None:
    """A setting that no browser's origin could equal is refused."""
    with pytest.raises(InvalidConfig, match="cors_origins is"):
        RouterConfig("m", cors_origins=(origin,))


async def test_paths_may_have_the_prefix_of_a_proxy(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """With root_path a path is served with the prefix and without, needs the same key, and has its API's errors."""
    keys = write_keys(tmp_path / "keys.json")
    router = await start_http_router(FakeGroup(), root_path="/llm/a", key_file=keys)
    key = {"authorization": f"Bearer {SEARCH}"}
    for path in ("/v1/models", "/llm/a/v1/models"):
        assert (await router.request("GET", path))[0] == 401
        assert (await router.request("GET", path, None, key))[0] == 200
    assert (await router.request("GET", "/llm/a/health"))[0] == 200
    for path in ("/llm/v1/models", "/llm/av1/models", "/llm/a/llm/a/v1/models", "/llm/a"):
        assert (await router.request("GET", path, None, key))[0] in (403, 404), path
    _, _, text = await router.request("POST", "/llm/a/v1/messages", {}, key)
    assert json.loads(text)["type"] == "error"


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "//", "/v1", "/dashboard"])
def test_a_root_path_is_checked(path: str) -> None:
    """A prefix that no path could have, or with which the API's own paths begin, is refused."""
    with pytest.raises(InvalidConfig, match="root_path is"):
        RouterConfig("m", root_path=path)


async def test_usage_may_be_in_every_chunk(start_http_router: StartHttpRouter) -> None:
    """With enable_force_include_usage each chunk of a stream has its usage so far, as gateways that bill want it, also
    if the request asks for none or for the last chunk's alone."""
    router = await start_http_router(FakeGroup(), enable_force_include_usage=True)
    for path, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        body = {"max_tokens": 3, "stream": True, **prompt}
        for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}):
            status, _, text = await router.request("POST", f"/v1/{path}", body | options)
            assert status == 200, text
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
            usages = [json.loads(line).get("usage") for line in lines]
            assert None not in usages and usages[-1]["completion_tokens"] == 3, usages
        assert (await router.request("POST", f"/v1/{path}", {"max_tokens": 3, **prompt}))[0] == 200


async def test_a_chat_template_of_the_request(start_http_router: StartHttpRouter) -> None:
    """It is refused by name unless the server trusts its clients; then it makes the prompt."""
    own = {"messages": [{"role": "user", "content": "hello"}], "chat_template": "X{{ messages[0].content }}"}
    router = await start_http_router(FakeGroup())
    error = await router.expect_refusal("/v1/chat/completions", own)
    assert "--trust-request-chat-template" in error["message"] and error["param"] == "chat_template"
    group = FakeGroup()
    trusting = await start_http_router(group, trust_request_chat_template=True)
    status, _, text = await trusting.request("POST", "/v1/chat/completions", own | {"max_tokens": 2})
    assert status == 200, text
    assert list(group.submits[-1].prompt_token_ids) == byte_level_tokenizer().encode("Xhello").ids
    for wrong in ("{% if %}", "x" * 70_000):
        error = await trusting.expect_refusal("/v1/chat/completions", own | {"chat_template": wrong})
        assert error["param"] == "chat_template"


async def test_tokenizer_info(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """GET /tokenizer_info returns the tokenizer's settings, special tokens as texts, and the chat template. It needs a
    setting, which the error names, and a key where keys are required."""
    router = await start_http_router(FakeGroup())
    status, _, text = await router.request("GET", "/tokenizer_info")
    assert status == 404 and "--enable-tokenizer-info-endpoint" in text
    model = TokenizerJson.load(str(write_model(tmp_path / "model")))
    keys = write_keys(tmp_path / "keys.json")
    told = await start_http_router(FakeGroup(), tokenizer=model, enable_tokenizer_info_endpoint=True, key_file=keys)
    assert (await told.request("GET", "/tokenizer_info"))[0] == 401
    headers = {"authorization": f"Bearer {SEARCH}"}
    status, _, text = await told.request("GET", "/tokenizer_info", None, headers)
    assert (status, json.loads(text)) == (200, {
        "tokenizer_class": None, "bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "chat_template": TEMPLATE,
    })  # fmt: skip


async def test_an_admin_resets_the_caches(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """Every attached group is told; users and monitors may not, and neither may a web page."""
    groups = [FakeGroup("g0"), FakeGroup("g1")]
    router = await start_http_router(*groups, key_file=write_keys(tmp_path / "keys.json"))

    async def reset(key: str, **headers: str) -> tuple[int, str]:
        named = {"authorization": f"Bearer {key}", **headers}
        status, _, text = await router.request("POST", "/reset_prefix_cache", None, named)
        return status, text

    assert [(await reset(key))[0] for key in (SEARCH, EYES, "no-key")] == [403, 403, 401]
    assert (await reset(OPS, origin="http://localhost"))[0] == 403
    status, text = await reset(OPS)
    assert (status, json.loads(text)) == (200, {"groups": ["g0", "g1"]})
    for group in groups:
        await group.until(lambda group=group: group.cache_resets == 1)  # type: ignore[misc]
