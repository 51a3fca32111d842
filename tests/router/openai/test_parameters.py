"""Every parameter of OpenAI's own client, and those of other engines' clients: each works, is ignored, or is
refused."""

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions

from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.tiny_tokenizer import TEMPLATE, write_model

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}
# dataclasses.asdict of vLLM's StructuredOutputsParams
VLLM_STRUCTURE = {
    "json": {"type": "null"}, "regex": None, "choice": None, "grammar": None, "json_object": None,
    "disable_any_whitespace": True, "disable_fallback": False, "disable_additional_properties": False,
    "whitespace_pattern": None, "structural_tag": None, "_backend": None, "_backend_was_auto": False,
}  # fmt: skip
# Of both endpoints. What is taken cannot change an answer, or asks for what happens anyway.
WORKS: dict[str, list[Any]] = {
    "model": ["tiny", ""], "frequency_penalty": [0.5], "logit_bias": [{"5": -100}], "max_tokens": [2], "n": [2],
    "presence_penalty": [-0.5], "seed": [7, -7], "stop": ["x", ["x", "y"], []], "stream": [True, False],
    "temperature": [0, 2.0], "top_p": [0.5], "user": ["me"],
}  # fmt: skip
CHAT_WORKS: dict[str, list[Any]] = {
    **WORKS, "messages": [[{"role": "user", "content": "hi"}]], "max_completion_tokens": [2], "logprobs": [True, False],
    "top_logprobs": [], "tools": [[TOOL], []], "tool_choice": ["none"], "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}, {"type": "json_object"}, SCHEMA], "stream_options": [],
    "reasoning_effort": ["low"], "metadata": [{"a": "b"}], "modalities": [["text"]], "store": [False, True],
    "service_tier": ["auto", "flex"], "safety_identifier": ["me"], "prediction": [{"type": "content", "content": "a"}],
    "prompt_cache_key": ["a"], "prompt_cache_options": [{"mode": "implicit"}], "prompt_cache_retention": ["24h"],
    "verbosity": ["low", "medium", "high"], "functions": [[]], "function_call": ["none", "auto"],
}  # fmt: skip
CHAT_REFUSED: dict[str, list[Any]] = {
    "audio": [{"voice": "a", "format": "wav"}], "modalities": [["text", "audio"]],
    "web_search_options": [{}], "moderation": [{"model": "a"}], "verbosity": ["long"],
    "functions": [[{"name": "f"}]], "function_call": [{"name": "f"}], "n": [0, -1], "top_logprobs": [2],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}], "stream_options": [{}],
    "response_format": [{"type": "structural_tag"}], "tools": [[{"type": "web_search"}]],
}  # fmt: skip
TEXT_WORKS: dict[str, list[Any]] = {
    **WORKS, "prompt": ["a", [5, 6], ["a", "b"], [[5], [6]]], "best_of": [1], "echo": [True, False],
    "logprobs": [0, 5], "suffix": [""], "stream_options": [],
}  # fmt: skip
TEXT_REFUSED: dict[str, list[Any]] = {"suffix": ["b"], "best_of": [2], "stream_options": [{}]}
# Other engines' clients, at both endpoints.
OTHERS_WORK: dict[str, list[Any]] = {
    "truncate_prompt_tokens": [5, -1],
    "top_k": [5, -1, 0], "min_p": [0.1], "repetition_penalty": [1.1], "min_tokens": [1], "ignore_eos": [True],
    "stop_token_ids": [[5]], "include_stop_str_in_output": [True], "no_stop_trim": [True],
    "skip_special_tokens": [False], "cache_salt": ["a"], "priority": [-3], "return_token_ids": [True],
    "prompt_logprobs": [1], "structured_outputs": [{"regex": "a+"}, {"choice": ["a", "b"]}, VLLM_STRUCTURE],
    "guided_json": [{"type": "null"}], "guided_regex": ["a+"], "guided_choice": [["a"]],
    "guided_grammar": ['start: "a"'], "json_schema": ['{"type": "null"}'], "regex": ["a+"], "ebnf": ['root ::= "a"'],
    "request_id": ["a"], "rid": ["a"], "session_id": ["a"], "custom_labels": [{"a": "b"}], "stream_interval": [4],
    "use_beam_search": [False], "length_penalty": [1.0], "early_stopping": [False], "watermarking": [False],
    "spaces_between_special_tokens": [True], "bad_words": [[], ["a"]], "allowed_token_ids": [[5]],
    "thinking_token_budget": [5], "max_reasoning_tokens": [0, 5], "logits_processors": [[]],
    "return_tokens_as_token_ids": [False, True], "return_hidden_states": [False], "return_routed_experts": [False],
    "routed_experts_prompt_start": [0], "return_token_offsets": [False], "lora_path": [None], "best_of": [1],
    "return_weight_versions": [False], "return_mm_kwargs": [False], "return_meta_info": [False],
    "return_cached_tokens_details": [False], "return_prompt_token_ids": [False], "routed_experts_start_len": [0],
    "mm_processor_kwargs": [{}], "media_io_kwargs": [{}], "vllm_xargs": [{}], "thinking_budget": [5],
    "cache_prompt": [True], "timings_per_token": [True], "return_progress": [False], "id_slot": [-1], "ttl": [300],
    "keep_alive": ["5m"], "kv_transfer_params": [{}], "documents": [[]], "tool_stream": [True],
    "require_reasoning": [False],
}  # fmt: skip
OTHERS_REFUSED: dict[str, list[Any]] = {
    "use_beam_search": [True], "length_penalty": [2.0],
    "logits_processors": [["a"]], "logprob_token_ids": [[5]], "watermarking": [True],
    "prompt_embeds": ["a"], "kv_transfer_params": [{"a": 1}], "vllm_xargs": [{"a": 1}], "lora_path": ["a"],
    "return_hidden_states": [True], "repetition_detection": [{"a": 1}],
    "stop_regex": ["a"], "custom_logit_processor": ["a"], "session_params": [{"a": 1}],
    "chat_template": ["{{ a }}"], "documents": [[{"a": "b"}]], "mm_processor_kwargs": [{"a": 1}], "top_a": [0.5],
    "best_of": [2], "require_reasoning": [True],
    "structured_outputs": [{"json": {"type": "null"}, "disable_additional_properties": True}],
}  # fmt: skip
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "a", "max_tokens": 2},
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model whose chat template uses tools and reasoning_effort."""
    knows = "{{ tools | tojson if tools else '' }}{{ reasoning_effort or '' }}"
    template = TEMPLATE.replace("{% if add", knows + "{% if add")
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("tools"), template)))


@pytest.mark.parametrize(
    ("create", "path", "works", "refused"),
    [(Chat.create, CHAT, CHAT_WORKS, CHAT_REFUSED), (Completions.create, TEXT, TEXT_WORKS, TEXT_REFUSED)],
    ids=["chat", "completions"],
)
async def test_each_parameter_of_openai_s_client(
    start_http_router: StartHttpRouter,
    tools: TokenizerJson,
    create: Any,
    path: str,
    works: dict[str, list[Any]],
    refused: dict[str, list[Any]],
) -> None:
    """No parameter is unknown; each value is served, or refused by the parameter's name."""
    of_the_call = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(create).parameters) - of_the_call == works.keys() | refused.keys()
    await tried(start_http_router, tools, path, works, refused)


async def test_a_refusal_says_what_to_send_instead(start_http_router: StartHttpRouter, tools: TokenizerJson) -> None:
    """Beam search, background responses and KV from elsewhere are refused with the reason, under the name that was
    sent."""
    router = await start_http_router(FakeGroup(), tokenizer=tools)
    beams = "(there is no beam search: ask for n choices with logprobs, and rank them); remove it"
    bodies: list[tuple[str, dict[str, Any], str, str]] = [
        (path, LEAST[path] | {name: value}, name, beams)
        for path in (CHAT, TEXT)
        for name, value in (("use_beam_search", True), ("length_penalty", 2.0), ("early_stopping", True))
    ]
    bodies.append(("/v1/responses", {"input": "hi", "background": True}, "background", "wait for it, or stream it"))
    transfer = "kv_transfer_params"
    bodies += [
        (
            path,
            LEAST[path] | {"kv_transfer_params": transfer},
            "kv_transfer_params",
            "computes prompt and answer itself",
        )
        for path in (CHAT, TEXT)
    ]
    for path, body, name, words in bodies:
        error = await router.expect_refusal(path, body)
        assert error["param"] == name and f"Unsupported parameter {name!r} (" in error["message"], error
        assert words in error["message"], error


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_each_parameter_of_other_engines(
    start_http_router: StartHttpRouter, tools: TokenizerJson, path: str
) -> None:
    """Each works, is accepted if it asks for the default behaviour, or is refused by its name."""
    await tried(start_http_router, tools, path, OTHERS_WORK, OTHERS_REFUSED)


async def tried(
    start_http_router: StartHttpRouter,
    tools: TokenizerJson,
    path: str,
    works: dict[str, list[Any]],
    refused: dict[str, list[Any]],
) -> None:
    router = await start_http_router(FakeGroup(), tokenizer=tools)
    for name, values in works.items():
        for value in values:
            body = LEAST[path] | {name: value}
            if name == "tool_choice":
                body["tools"] = [TOOL]
            status, _, text = await router.request("POST", path, body)
            assert status == 200 and '"finish_reason"' in text, (name, value, text)
    for name, values in refused.items():
        for value in values:
            error = await router.expect_refusal(path, LEAST[path] | {name: value})
            assert name in error["message"] or name in str(error["param"]), (name, value, error)
            assert "Unknown" not in error["message"], (name, value, error)


async def test_some_go_together(start_http_router: StartHttpRouter) -> None:
    """`top_logprobs` needs `logprobs`, `stream_options` needs `stream`, and `best_of` must equal `n`."""
    router = await start_http_router(FakeGroup())
    for path, more in (
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        (TEXT, {"n": 2, "best_of": 2}),
        (CHAT, {"n": 2, "best_of": 2}),
    ):
        assert (await router.request("POST", path, LEAST[path] | more))[0] == 200
