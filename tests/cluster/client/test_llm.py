"""LLM: the same tokens as a server, in this process."""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import coatcheck
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client.llm import LLMSettings
from coatcheck.proto.errors import ContextLengthExceeded, InvalidConfig, InvalidModel, InvalidRequest, Unavailable
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.workers.core.group_config import GroupConfig
from tests.workers.rank_group import RankGroup

DEMO = str(Path(__file__).parents[3] / "demo" / "model")
SETTINGS: LLMSettings = {"dtype": "float32", "kv_memory": float(32 << 20), "max_num_seqs": 4}
PROMPTS = ["def main():", "The string", "import os\n", "A list of", "class Point:", "for index in"]


@pytest.fixture(scope="module")
def first_draws() -> list[list[int]]:
    """The first tokens that the module's LLM draws."""
    return []


@pytest.fixture(scope="module")
def llm(first_draws: list[list[int]]) -> coatcheck.LLM:
    """The demo model in this process."""
    llm = coatcheck.LLM(DEMO, seed=5, **SETTINGS)
    first_draws.extend(result.token_ids for result in llm.generate(PROMPTS[:2], max_tokens=8))
    return llm


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """The address of the same model in a process of its own."""
    ranks = RankGroup(GroupConfig(name="g", model=DEMO, served_model_name=DEMO, **SETTINGS))  # type: ignore[arg-type, misc]
    yield ranks.wait_ready()
    ranks.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(group: str) -> AsyncIterator[coatcheck.AsyncClient]:
    """A client of a router that uses the group."""
    router = Router(RouterConfig(model=DEMO))
    address = await router.start()
    await router.set_groups([GroupEndpoint("g", group)])
    async with coatcheck.AsyncClient(address) as client, asyncio.timeout(MAX_WAIT_SECONDS) as limit:
        while True:
            with contextlib.suppress(Unavailable):
                await client.get_model()
                break
            await asyncio.sleep(0.05)
        limit.reschedule(None)
        yield client
    await router.stop()


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"seed": 11, "n": 2}, {"temperature": 0.0, "stop": ["e"], "logprobs": 2}],
    ids=["greedy", "drawn", "stop string"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_are_those_of_a_server(
    llm: coatcheck.LLM, client: coatcheck.AsyncClient, options: dict[str, object]
) -> None:
    """More prompts than the engine runs at once give, in order, what a router and a group in float32 give."""
    served = [await client.generate(prompt, max_tokens=12, **options) for prompt in PROMPTS]  # type: ignore[arg-type, misc]
    ours = await asyncio.to_thread(lambda: llm.generate(PROMPTS, max_tokens=12, **options))  # type: ignore[arg-type, misc]
    assert [result.text for result in ours] == [result.text for result in served]
    for one, other in zip(ours, served, strict=True):
        assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
        assert [choice.finish_reason for choice in one.choices] == [choice.finish_reason for choice in other.choices]
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert [len(choice.logprobs) for choice in one.choices] == [len(choice.logprobs) for choice in other.choices]


def test_a_call_may_have_an_adapter(llm: coatcheck.LLM, tmp_path: Path) -> None:
    """Its tokens are those of transformers with the adapter merged, and calls without one have the model's own."""
    from tests.workers.lora.adapter_files import greedy, merged_model, write_adapter  # torch, which `llm` has imported

    folder = write_adapter(Path(DEMO), tmp_path / "sql", seed=1)
    settings: LLMSettings = {**SETTINGS, "lora_modules": [f"sql={folder}"]}
    adapted = coatcheck.LLM(DEMO, **settings)
    sampling: dict[str, Any] = dict(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompt = [5, 40, 12, 9, 33]
    (plain,), (own,) = llm.generate(prompt, **sampling), adapted.generate(prompt, **sampling)
    (found,) = adapted.generate(prompt, adapter="sql", **sampling)
    assert own.token_ids == plain.token_ids != found.token_ids
    assert found.token_ids == greedy(merged_model(Path(DEMO), folder), prompt, 6)
    assert (found.model, own.model) == ("sql", plain.model)
    with pytest.raises(InvalidRequest, match="has no LoRA adapter 'chat'; it has sql"):
        adapted.generate(prompt, adapter="chat")
    with pytest.raises(InvalidRequest, match="it has none; give lora_modules to LLM"):
        llm.generate(prompt, adapter="sql")


def test_one_prompt_gives_one_result(llm: coatcheck.LLM) -> None:
    """A text, token ids, a list of one of them: each is one prompt; no prompt is no result."""
    assert len(llm.generate("x", max_tokens=2)) == 1
    assert len(llm.generate([1, 2, 3], max_tokens=2)) == 1
    assert len(llm.generate([[1, 2, 3]], max_tokens=2)) == 1
    assert llm.generate([]) == []


def test_a_seed_repeats_all_draws(llm: coatcheck.LLM, first_draws: list[list[int]]) -> None:
    """Two LLMs of one seed draw the same tokens for requests that have no seed of their own."""
    second = coatcheck.LLM(DEMO, seed=5, **SETTINGS)
    assert [result.token_ids for result in second.generate(PROMPTS[:2], max_tokens=8)] == first_draws


def test_a_refused_prompt_costs_the_others_nothing(llm: coatcheck.LLM) -> None:
    """A batch with a prompt that cannot be served raises; the next batch is answered."""
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.generate(["good", ""], max_tokens=2)
    with pytest.raises(ContextLengthExceeded):
        llm.generate(["good", [1] * (llm.max_model_len + 1)], max_tokens=2)  # type: ignore[arg-type, misc]
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        llm.generate("good", structured=coatcheck.Grammar("regex", "(["), max_tokens=4)
    assert llm.generate("good", max_tokens=2, temperature=0.0)[0].finish_reason == "length"


@pytest.mark.parametrize("option", ["cache_salt", "request_id", "timeout", "temprature"])
def test_an_option_that_would_have_no_effect_is_refused(llm: coatcheck.LLM, option: str) -> None:
    """Options of a request to a server, and unknown names, are refused instead of ignored."""
    options: dict[str, Any] = {option: "1"}
    with pytest.raises(InvalidRequest, match=f"LLM has no option {option}; it has max_tokens, "):
        llm.generate("good", **options)
    with pytest.raises(InvalidRequest, match=f"LLM has no option {option}; "):
        llm.chat([{"role": "user", "content": "good"}], **options)


@pytest.mark.parametrize("prompts", [{"prompt": "a"}, [{"prompt": "a"}], None, [None], ["a", 5], b"a", 5])
def test_a_prompt_of_a_wrong_type_is_refused(llm: coatcheck.LLM, prompts: Any) -> None:
    """What is no prompt and no list of prompts raises InvalidRequest, with the two forms of a prompt."""
    with pytest.raises(InvalidRequest, match="a prompt must be one text, or one list of token ids") as refused:
        llm.generate(prompts)
    assert "call the method" not in str(refused.value)  # LLM takes lists


@pytest.mark.parametrize("conversations", [{"role": "user", "content": "a"}, "a", ["a"], None])
def test_a_conversation_of_a_wrong_type_is_refused(llm: coatcheck.LLM, conversations: Any) -> None:
    """What is no conversation and no list of them raises InvalidRequest, with the form of a conversation."""
    with pytest.raises(InvalidRequest, match="a conversation must be a list of messages"):
        llm.chat(conversations)


def test_several_sampling_params_are_refused(llm: coatcheck.LLM) -> None:
    """A list of SamplingParams, one for each prompt, raises InvalidRequest that says to give one."""
    with pytest.raises(InvalidRequest, match="give one SamplingParams, which holds for every prompt"):
        llm.generate(["a"], [coatcheck.SamplingParams()])  # type: ignore[arg-type]


def test_structured_output(llm: coatcheck.LLM) -> None:
    """A grammar holds as it does on a server."""
    (result,) = llm.generate("Is it so? ", structured=coatcheck.Grammar.of_choices(["yes", "no"]))
    assert result.text in ("yes", "no")


def test_an_interrupted_batch_leaves_the_engine_empty(llm: coatcheck.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C within a batch no sequence runs, and the next batch is answered."""
    engine = llm._engine
    step, steps = engine.step, iter(range(100))

    def interrupted() -> object:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, max_tokens=50)
    monkeypatch.undo()
    assert not engine.has_work
    engine.check()
    assert len(llm.generate(PROMPTS, max_tokens=2)) == len(PROMPTS)


def test_a_progress_bar_is_shown_where_it_is_asked_for(llm: coatcheck.LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """`progress` writes a bar to the standard error; without it nothing is written there."""
    llm.generate("x", max_tokens=2, progress=True)
    assert "1/1" in capfd.readouterr().err
    llm.generate("x", max_tokens=2)
    assert capfd.readouterr().err == ""


def test_a_model_id_that_the_hub_refuses_has_a_short_traceback() -> None:
    """The traceback is that of `LLM` alone, without the hub client's, which has a hundred lines; the error has one."""
    with pytest.raises(InvalidModel, match="nor a model that can be downloaded from the hub") as refused:
        coatcheck.LLM("nobody/never--was")
    assert "\n" not in str(refused.value)
    assert "huggingface_hub" not in "".join(traceback.format_exception(refused.value))


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    """A folder without a model and settings that cannot be raise what a server would say."""
    with pytest.raises(InvalidModel):
        coatcheck.LLM(str(tmp_path))
    with pytest.raises(InvalidConfig, match="kv-memory"):
        coatcheck.LLM(DEMO, kv_memory="much")
    with pytest.raises(InvalidConfig, match="dtype"):
        coatcheck.LLM(DEMO, dtype="float8")
    for model in (5, None, [DEMO]):
        with pytest.raises(InvalidConfig, match="model is .*; it must be one directory or one Hugging Face model id"):
            coatcheck.LLM(model)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="LLM has no setting tp"):
        coatcheck.LLM(DEMO, tp=2)  # type: ignore[call-arg]
