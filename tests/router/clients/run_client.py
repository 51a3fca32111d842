"""What a client of another project does with a server: `clients-python run_client.py CLIENT ADDRESS`.

It runs in a Python of its own (tests/programs/clients.txt), because these clients need other versions of packages than
the server. The server thinks "hm", calls the tool that it is given for Bonn, and says "It rains." without tools.
"""

import asyncio
import os
import sys
from typing import Any

from pydantic import BaseModel

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Place(BaseModel):
    """A city."""

    city: str


def langchain(url: str) -> None:
    """Chat and Responses; whole, streamed, with tools, structured, with log-probabilities."""
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

    for extra in ({}, {"use_responses_api": True, "verbosity": "low", "include": ["reasoning.encrypted_content"]}):
        model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0, **extra)
        assert model.invoke("hello").text == "It rains."
        streamed = list(model.stream("hello", stream_usage=True) if not extra else model.stream("hello"))
        assert "".join(chunk.text for chunk in streamed) == "It rains."
        called = model.bind_tools([WEATHER], parallel_tool_calls=False).invoke("hello")
        assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Bonn"})]
        result = ToolMessage([{"type": "text", "text": "rain"}], tool_call_id=called.tool_calls[0]["id"])
        assert model.invoke([HumanMessage("hello"), called, result]).text == "It rains."
        for method in ("json_schema", "function_calling"):
            assert model.with_structured_output(Place, method=method).invoke("hello").city == "Bonn"
    scored = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none").bind(logprobs=True, top_logprobs=2)
    assert scored.invoke("hello").response_metadata["logprobs"]["content"]


def litellm(url: str) -> None:
    """Chat under two names of providers and through Anthropic's API; Responses, embeddings, rerank."""
    import litellm as client  # type: ignore[import-not-found]

    options: dict[str, Any] = {"messages": HELLO, "api_key": "none", "max_retries": 0}
    for model, base in (("openai/tiny", f"{url}/v1"), ("hosted_vllm/tiny", f"{url}/v1"), ("anthropic/tiny", url)):
        options |= {"model": model, "api_base": base, "max_tokens": 200}
        message = client.completion(**options).choices[0].message
        assert (message.content, message.reasoning_content) == ("It rains.", "hm"), model
        pieces = list(client.completion(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "It rains.", model
        called = client.completion(**options, tools=[WEATHER], tool_choice="auto").choices[0].message
        (call,) = called.tool_calls
        history = [*HELLO, called.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        assert client.completion(**options | {"messages": history}, tools=[WEATHER]).choices[0].message.content
    keys: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    made = client.responses(model="openai/tiny", api_base=f"{url}/v1", input="hello", **keys)
    assert made.output[-1].content[0].text == "It rains."
    assert len(client.embedding(model="openai/tiny", api_base=f"{url}/v1", input=["a", "b"], **keys).data) == 2
    ranked = client.rerank(model="hosted_vllm/tiny", api_base=url, query="a", documents=["b", "a"], top_n=1, **keys)
    assert ranked.results[0]["index"] == 1


def instructor(url: str) -> None:
    """Objects by tools, strict tools, JSON and JSON schema, and by Responses."""
    import instructor as client  # type: ignore[import-not-found]
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (client.Mode.TOOLS, client.Mode.TOOLS_STRICT, client.Mode.JSON, client.Mode.JSON_SCHEMA):
        create: Any = client.from_openai(plain, mode=mode).chat.completions.create
        assert create(model="tiny", response_model=Place, messages=HELLO, max_retries=0).city == "Bonn", mode
    by_responses = client.from_openai(plain, mode=client.Mode.RESPONSES_TOOLS)
    assert by_responses.responses.create(model="tiny", response_model=Place, input="hello").city == "Bonn"


def agents(url: str) -> None:
    """OpenAI's agents run a tool and answer, over chat and Responses, whole and streamed."""
    import agents as client  # type: ignore[import-not-found]
    import openai

    client.set_tracing_disabled(True)
    plain = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    @client.function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Now."""
        return f"rain in {city}"

    settings = client.ModelSettings(parallel_tool_calls=True, store=True, metadata={"a": "b"}, verbosity="low")

    async def run(model: Any) -> None:
        agent = client.Agent(name="a", instructions="be brief", model=model, tools=[weather], model_settings=settings)
        assert (await client.Runner.run(agent, "hello")).final_output == "It rains."
        streamed = client.Runner.run_streamed(agent, "hello")
        assert len([event async for event in streamed.stream_events()]) > 5
        assert streamed.final_output == "It rains."
        placed = client.Agent(name="a", model=model, output_type=Place)
        assert (await client.Runner.run(placed, "hello")).final_output == Place(city="Bonn")

    async def run_both() -> None:
        for kind in (client.OpenAIResponsesModel, client.OpenAIChatCompletionsModel):
            await run(kind(model="tiny", openai_client=plain))

    asyncio.run(run_both())


def lm_eval(url: str) -> None:
    """Log-probabilities of token ids, one prompt a request, several, and several requests at a time; of texts, which
    the server tokenizes; texts; chats."""
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.models.openai_completions import (  # type: ignore[import-not-found]
        LocalChatCompletion,
        LocalCompletionsAPI,
    )

    keys: dict[str, Any] = {"model": "tiny", "max_retries": 1}
    pairs = [(("", ""), [9, 8, 7], [6, 5]), (("", ""), [9], [40, 41, 42]), (("", ""), [8, 8, 8, 8], [4])]
    scored = []
    for options in ({}, {"batch_size": 2}, {"num_concurrent": 2}, {"num_concurrent": 2, "batch_size": 2}):
        model = LocalCompletionsAPI(f"{url}/v1/completions", tokenizer_backend=None, **options, **keys)
        model.tokenizer, model.tokenized_requests = "the ids are given", True
        scored.append(list(model._loglikelihood_tokens(pairs)))
    assert all(found == scored[0] for found in scored[1:]), scored
    assert len({logprob for logprob, _ in scored[0]}) == 3 and all(-1000 < logprob < 0 for logprob, _ in scored[0])

    remote = LocalCompletionsAPI(f"{url}/v1/completions", **keys)
    assert remote.tokenizer_backend == "remote" and remote.eos_string == "</s>"
    ((logprob, _),) = remote.loglikelihood([Instance("loglikelihood", {}, ("hello", " world"), 0)])
    assert -1000 < logprob < 0

    def generate(model: Any, prompt: Any, **options: Any) -> str:
        (text,) = model.generate_until([Instance("generate_until", {}, (prompt, options), 0)])
        return str(text)

    texts = LocalCompletionsAPI(f"{url}/v1/completions", tokenizer_backend=None, **keys)
    assert generate(texts, "hello", until=["rains"], max_gen_toks=200) == "<think>hm</think>It "
    chats = LocalChatCompletion(f"{url}/v1/chat/completions", **keys)
    assert generate(chats, chats.apply_chat_template(HELLO), until=["nothing"], max_gen_toks=200) == "It rains."


if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    {one.__name__: one for one in (langchain, litellm, instructor, agents, lm_eval)}[sys.argv[1]](
        f"http://{sys.argv[2]}"
    )
