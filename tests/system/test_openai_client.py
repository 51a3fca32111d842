"""OpenAI's client against a router and a group of one rank with a tiny model, without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.workers.model.model import Model
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService
from tests.router.tiny_tokenizer import write_model
from tests.workers.engine_thread import EngineThread
from tests.workers.structured.structured_engine import engines_of, load_alone, write_checkpoint

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


class Unit(BaseModel):
    """Within other models."""

    name: Literal["celsius", "kelvin"]
    rounded: bool


class Reading(BaseModel):
    """Two units, one of which may be missing."""

    shown: Unit
    stored: Unit | None


class Alarm(BaseModel):
    """Contains a class with the same name as another model's."""

    unit: Unit


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama whose chat template has tools."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model") / "llama")
    return write_model(directory, TEMPLATE)


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    """The same model, loaded."""
    return load_alone(directory)


@asynccontextmanager
async def served(model: Model, generation_config: str = "auto") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a router in front of one group."""
    engine = engines_of(model)()
    described = public.GetModelResponse(
        name="tiny", max_model_len=256, vocab_size=600, block_size=8, fingerprint=model.spec.fingerprint,
        eos_token_ids=model.spec.eos_token_ids,
    )  # fmt: skip
    registration = wire.Registration(group="g0", epoch="e", num_blocks=200, model=described)
    service = WorkerService(GroupReport(registration, [public.RankStatus(rank=0, healthy=True)]))
    deaths: list[BaseException] = []
    loop = EngineThread(engine, on_step=service.publish, on_death=deaths.append)
    address = GroupEndpoint("g0", service.start(loop, "127.0.0.1:0"))
    loop.start()
    config = RouterConfig(
        model=str(model.directory), served_model_name="tiny", http_port=0, generation_config=generation_config
    )
    router = Router(config)
    await router.start()
    try:
        await router.set_groups([address])
        while not router.groups.serving():
            await router.groups.next_change.wait()
        async with openai.AsyncOpenAI(
            base_url=f"http://{router.http_address}/v1", api_key="none", max_retries=0
        ) as client:
            yield client
    finally:
        await router.stop()
        await asyncio.to_thread(loop.stop)
        await asyncio.to_thread(service.stop)
    assert deaths == []


@pytest.mark.parametrize("choice", ["required", "Reading"])
async def test_a_model_s_calls_fit_nested_pydantic_models(model: Model, choice: str) -> None:
    """With a random model, a forced call of a function with nested pydantic models parses as those models."""
    tools = [openai.pydantic_function_tool(kind) for kind in (Reading, Alarm)]
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    async with served(model) as client:
        for seed in range(4):
            asked: dict[str, Any] = dict(
                model="tiny", messages=[{"role": "user", "content": "now?"}], tools=tools, tool_choice=forced,
                parallel_tool_calls=False, seed=seed, max_tokens=150,
            )  # fmt: skip
            completion = await client.chat.completions.parse(**asked)
            (call,) = completion.choices[0].message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, Reading | Alarm)
            async with client.chat.completions.stream(**asked) as stream:
                streamed = (await stream.get_final_completion()).choices[0].message.tool_calls or []
            assert [one.function.parsed_arguments for one in streamed] == [call.function.parsed_arguments]


async def test_what_is_left_unset_is_drawn_as_the_model_s_file_says(model: Model) -> None:
    """With a greedy generation_config.json, requests that set no sampling are greedy, unless --generation-config is
    none."""
    file = model.directory / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"do_sample": False, "max_new_tokens": 12}))
    asked: dict[str, Any] = dict(model="tiny", prompt="the quick brown fox", seed=1, extra_body={"ignore_eos": True})
    try:
        async with served(model) as client:
            unset = (await client.completions.create(**asked)).choices[0].text
            greedy = (await client.completions.create(**asked, temperature=0.0)).choices[0].text
            warm = (await client.completions.create(**asked, temperature=1.0)).choices[0].text
            chat: list[Any] = [{"role": "user", "content": "now?"}]
            answer = await client.chat.completions.create(model="tiny", messages=chat, extra_body={"ignore_eos": True})
        async with served(model, "none") as client:
            without = (await client.completions.create(**asked)).choices[0].text
    finally:
        file.write_text(before)
    assert unset == greedy != warm == without
    assert answer.usage is not None and answer.usage.completion_tokens == 12
