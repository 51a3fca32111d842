"""A model's generation_config.json has the defaults of sampling fields, over gRPC and HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, GetModelRequest, SamplingParams, TokenIds
from coatcheck.router.config import RouterConfig
from coatcheck.router.server import Router
from tests.router.fake_group import FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.tiny_tokenizer import write_model

SAID = {"do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}
DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OURS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDS = TokenIds(ids=[5, 6, 7])
CHAT: list[Any] = [{"role": "user", "content": "a"}]


def write(directory: Path, said: dict[str, Any]) -> dict[str, Any]:
    """The settings of a router whose model has the values `said` in its generation_config.json."""
    (write_model(directory) / "generation_config.json").write_text(json.dumps(said))
    return {"tokenizer": None, "model": str(directory), "served_model_name": "tiny"}


async def drawn(router: HttpRouter, protocol: str, **sampling: Any) -> dict[str, Any]:
    """The sampling values that a group gets for a request with `sampling`."""
    if protocol == "grpc":
        sampling = {"max_tokens": 1, **sampling}
        await router.generation.Generate(GenerateRequest(token_ids=IDS, sampling=SamplingParams(**sampling)))
    elif protocol == "completions":
        await router.openai.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1, extra_body=sampling)
    else:
        await router.openai.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1, extra_body=sampling)
    told = router.groups[0].submits[-1].sampling
    assert all(told.HasField(name) for name in DRAWN)
    return {name: getattr(told, name) for name in DRAWN}


@pytest.mark.parametrize("protocol", ["grpc", "completions", "chat"])
async def test_what_is_unset_is_the_model_s(start_http_router: StartHttpRouter, tmp_path: Path, protocol: str) -> None:
    """A field that a request leaves out has the file's value; a field that the request sends keeps its own, whatever
    the value."""
    router = await start_http_router(FakeGroup(), **write(tmp_path, SAID))
    wanted = {name: SAID[name] for name in DRAWN}
    assert await drawn(router, protocol) == wanted
    for name in DRAWN:
        for value in (OURS[name], {"top_k": 3}.get(name, 0.25)):
            assert await drawn(router, protocol, **{name: value}) == wanted | {name: value}


@pytest.mark.parametrize("protocol", ["grpc", "completions", "chat"])
@pytest.mark.parametrize("case", ["left out", "another field", "no file"])
async def test_without_it_our_own_defaults_hold(
    start_http_router: StartHttpRouter, tmp_path: Path, protocol: str, case: str
) -> None:
    """With `none`, without a file, and for fields that the file lacks, the defaults are ours."""
    settings = write(tmp_path, {"eos_token_id": 0} if case == "another field" else SAID)
    if case == "no file":
        (tmp_path / "generation_config.json").unlink()
    if case == "left out":
        settings["generation_config"] = "none"
    assert await drawn(await start_http_router(FakeGroup(), **settings), protocol) == OURS


async def test_null_and_off_in_a_body_are_as_ever(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """A null counts as a missing field; vLLM's -1 for top_k means "off", not the default."""
    router = await start_http_router(FakeGroup(), **write(tmp_path, SAID))
    assert (await drawn(router, "completions", temperature=None))["temperature"] == 0.5
    assert (await drawn(router, "completions", top_k=-1))["top_k"] == 0


async def test_the_most_new_tokens_are_the_model_s(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """max_new_tokens is the default of max_tokens, limited by the context. A request's own max_tokens and min_tokens
    have priority, and a completion's default stays 16."""
    router = await start_http_router(FakeGroup(), **write(tmp_path, {"max_new_tokens": 30}))
    group = router.groups[0]

    async def most(ids: int = 3, **sampling: int) -> int:
        asked = GenerateRequest(token_ids=TokenIds(ids=[5] * ids), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
        await router.generation.Generate(asked)
        return group.submits[-1].sampling.max_tokens

    assert (await most(), await most(max_tokens=40), await most(max_tokens=5)) == (30, 40, 5)
    assert (await most(min_tokens=35), await most(min_tokens=10)) == (35, 30)
    assert (await most(ids=246), await most(ids=226), await most(ids=225)) == (10, 30, 30)
    await router.openai.chat.completions.create(model="tiny", messages=CHAT)
    assert group.submits[-1].sampling.max_tokens == 30
    await router.openai.completions.create(model="tiny", prompt="a")
    assert group.submits[-1].sampling.max_tokens == 16


async def test_a_stream_goes_on_at_another_router_as_it_began(
    start_http_router: StartHttpRouter, tmp_path: Path
) -> None:
    """A request that is sent again to another router, with its seed and its delivered tokens, has the same sampling
    values at the group."""
    settings = write(tmp_path, SAID | {"max_new_tokens": 9})
    first, second = await start_http_router(FakeGroup(), **settings), await start_http_router(FakeGroup(), **settings)
    asked = GenerateRequest(token_ids=IDS)
    whole = await first.generation.Generate(asked)
    asked.sampling.seed = whole.started.seed
    asked.resume.add(token_ids=whole.choices[0].token_ids[:4])
    rest = await second.generation.Generate(asked)
    assert (
        list(rest.choices[0].token_ids) == list(whole.choices[0].token_ids)[4:] and len(rest.choices[0].token_ids) == 5
    )
    (before,), (after,) = first.groups[0].submits, second.groups[0].submits
    assert before.sampling == after.sampling and before.sampling.temperature == 0.5


async def test_the_model_s_page_has_them(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """GetModel and /v1/models show the defaults."""
    router = await start_http_router(FakeGroup(), **write(tmp_path, {"temperature": 0.5, "max_new_tokens": 9}))
    model = await router.generation.GetModel(GetModelRequest())
    assert model.default_sampling == SamplingParams(temperature=0.5, max_tokens=9) and model.name == "tiny"
    (listed,) = (await router.openai.models.list()).data
    assert listed.to_dict()["default_sampling"] == {"temperature": 0.5, "max_tokens": 9}
    plain = await start_http_router(FakeGroup())
    assert not (await plain.generation.GetModel(GetModelRequest())).HasField("default_sampling")


def test_a_router_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    """A value out of range keeps the router from starting, and the error names the field; --generation-config has two
    values."""
    settings = write(tmp_path, {"top_p": 5})
    with pytest.raises(InvalidModel, match="top_p is 5; it must be in"):
        Router(RouterConfig(model=settings["model"]))
    with pytest.raises(InvalidConfig, match="generation_config is 'vllm'; it must be auto or none"):
        RouterConfig(model="m", generation_config="vllm")
