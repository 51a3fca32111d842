"""The engine over models whose layers keep a state: a request's tokens depend on the request alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import DeltaNetSpec, LightningSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from coatcheck.workers.core.request import EngineRequest, Pooling
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.meta_model import adaptable_linears, prepare_model
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.model.model_rules import (
    check_convolutions,
    check_deterministic_states,
    check_host_tier,
    check_mixer_activation,
    check_state_device,
)
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.kv_memory import allocate_kv_pool, make_states
from coatcheck.workers.runner.memory_budget import subtract_states
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.resident_memory import resident_bytes, wait_until_populated
from tests.workers.checkpoints import ONE_RANK, VOCAB, tiny_checkpoint

PROMPT = [(i * 37 + 11) % (VOCAB - 3) + 3 for i in range(45)]
GREEDY = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, temperature=0.0)
GREEDY_ONE = SamplingParams(max_tokens=1, seed=1, temperature=0.0)
DRAWN = SamplingParams(max_tokens=40, seed=7, ignore_eos=True, temperature=0.9, top_k=40)
Make = Callable[..., Engine]


@pytest.fixture(
    scope="module",
    params=[
        "jamba",
        "kimi-linear",
        "lfm3",
        "mamba",
        "minimax",
        "olmo-hybrid",
        "qwen3-next",
        "qwen3.5",
        "qwen3.5-moe",
        "zamba2",
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_model(checkpoint, communicator=Communicator(), device="cpu")


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """Creates engines, each with a new pool and new states."""
    return engines_of(model)


def engines_of(model: Model) -> Make:
    def make_engine(
        num_blocks: int = 200,
        budget: int = 256,
        depth: int = 0,
        slots: int = 16,
        snapshots: int = 0,
        sizes: GraphSizes | None = None,
    ) -> Engine:
        layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
        pool = allocate_kv_pool(layout, num_blocks, torch.device("cpu"))
        runner = ModelRunner(
            model, layout, pool, max_num_seqs=slots, max_model_len=256, num_snapshots=snapshots,
            graph_sizes=sizes or GraphSizes(),
        )  # fmt: skip
        runner.graphs.capture()
        return Engine(
            model.spec, runner, num_blocks=num_blocks, block_size=8, max_num_seqs=slots, max_batch_tokens=budget,
            pipeline_depth=depth, num_snapshots=snapshots,
        )  # fmt: skip

    return make_engine


def ask(name: str = "a", prompt: list[int] = PROMPT, sampling: SamplingParams = DRAWN, **more: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, **more)


def run(engine: Engine, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    """The tokens of every choice."""
    for request in requests:
        engine.submit_request(request)
    said: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            said.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        engine.check()
    return said


@pytest.fixture(scope="module")
def alone(make: Make) -> list[int]:
    """The request's tokens alone on a new engine, its prompt in one chunk."""
    return run(make(), ask())["a", 0]


def greedy_tokens(checkpoint: Path) -> list[int]:
    """The 200 token ids that transformers' `generate` puts behind the prompt in float32."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    reference.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)  # type: ignore[misc]
    ids_behind: list[int] = out[0, len(PROMPT) :].tolist()
    return ids_behind


def test_200_greedy_tokens_are_transformers_own(make: Make, checkpoint: Path) -> None:
    """In float32 the 200 token ids after a prompt of 45, computed in chunks of 16, are those of its `generate`."""
    assert run(make(budget=16), ask(sampling=GREEDY))["a", 0] == greedy_tokens(checkpoint)


@pytest.mark.parametrize("arch", sorted(ONE_RANK))
def test_200_greedy_tokens_of_further_types(arch: str, tmp_path: Path) -> None:
    """Short convolutions and Mamba-2: whole, and in chunks of 16 beside neighbours with a preemption."""
    checkpoint = tiny_checkpoint(arch, tmp_path)
    make = engines_of(load_model(checkpoint, communicator=Communicator(), device="cpu"))
    wanted = greedy_tokens(checkpoint)
    assert run(make(), ask(sampling=GREEDY))["a", 0] == wanted
    engine = make(budget=16, num_blocks=70)
    requests = [ask(name, sampling=GREEDY) for name in ("first", "a", "third")]
    said = run(engine, *requests, ask("other", PROMPT[5:]))
    assert engine.stats().preemptions > 0
    assert said["first", 0] == said["a", 0] == said["third", 0] == wanted


def test_a_shared_block_is_held_once(tmp_path: Path) -> None:
    """Layers of zamba2 that share a block have one PackedLinear for each of its linears. These cannot have adapters:
    each layer would have its own."""
    path = tiny_checkpoint("zamba2", tmp_path)
    model: Any = load_model(path, communicator=Communicator(), device="cpu")
    first, other, second = (model._body.base.layers[index] for index in (1, 2, 4))
    for name in ("self_attn.q_proj", "feed_forward.gate_up_proj", "feed_forward.gate_up_proj_adapter_list.2.1"):
        linear = first.shared_transformer.get_submodule(name)
        assert isinstance(linear, PackedLinear) and linear is second.shared_transformer.get_submodule(name)
    assert first.shared_transformer.self_attn.q_proj is not other.shared_transformer.self_attn.q_proj
    assert first.linear is not second.linear
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert stored - 2**15 < model.spec.weight_bytes <= stored
    with Checkpoint.open(str(path)) as checkpoint:
        prepared = prepare_model(
            checkpoint, TpShard(0, 1), dtype="float32", device=torch.device("cpu"), max_model_len=None,
            deterministic_on=torch.device("cpu"), expert_parallel=False,
        )  # fmt: skip
    adaptable = adaptable_linears(prepared)
    assert {name.split(".")[2] for name in adaptable if "shared_transformer" in name} == {"2"}
    assert "model.layers.0.mamba.in_proj" in adaptable


@pytest.mark.parametrize("budget", [3, 16, 44])
def test_tokens_do_not_depend_on_chunks(make: Make, alone: list[int], budget: int) -> None:
    """The state goes from chunk to chunk of a prompt."""
    assert run(make(budget=budget), ask())["a", 0] == alone


def test_tokens_do_not_depend_on_the_batch(make: Make, alone: list[int]) -> None:
    """Neighbours with other prompts, of which one is the same request, change no token."""
    others = [ask(f"other{n}", PROMPT[n:] + PROMPT[:n]) for n in (3, 9, 20)]
    said = run(make(budget=20), others[0], ask(), others[1], ask("again"), others[2])
    assert said["a", 0] == said["again", 0] == alone


def test_padding_has_no_state(make: Make, alone: list[int]) -> None:
    """Steps that are padded as CUDA graphs are: padding leaves the states of all slots as they are."""
    engine = make(budget=20, sizes=GraphSizes((4, 8), (16, 24)))
    said = run(engine, ask("b", PROMPT[5:]), ask(), ask("c", PROMPT[7:]))
    assert said["a", 0] == alone


def test_tokens_do_not_depend_on_pipelining(make: Make, alone: list[int]) -> None:
    """A step that is launched before the last one is confirmed reads the state that the last one leaves."""
    assert run(make(depth=1, budget=20), ask(), ask("b", PROMPT[5:]))["a", 0] == alone


def test_a_slot_that_was_used_changes_no_token(make: Make, alone: list[int]) -> None:
    """With one slot, each sequence starts anew where another one has ended."""
    engine = make(slots=1)
    said = run(engine, ask("b", PROMPT[5:]), ask(), ask("c", PROMPT[7:]))
    assert said["a", 0] == alone
    assert run(engine, ask("again"))["again", 0] == alone


def test_tokens_do_not_depend_on_preemption(make: Make, alone: list[int]) -> None:
    """A preempted sequence gives up its state and computes it again."""
    engine = make(num_blocks=24)
    requests = [ask("first"), ask(), ask("third")]
    said = run(engine, *requests)
    assert engine.stats().preemptions > 0
    assert said["first", 0] == said["a", 0] == said["third", 0] == alone


def test_a_resumed_request_goes_on_exactly(make: Make, alone: list[int]) -> None:
    """Another group computes the prompt and the delivered tokens, and goes on with the token that follows them."""
    for delivered in (1, 11, 39):
        assert run(make(budget=16), ask(resume={0: tuple(alone[:delivered])}))["a", 0] == alone[delivered:]


def test_no_prompt_is_found_in_the_cache(make: Make, alone: list[int]) -> None:
    """Without slots for snapshots a prompt that was computed before is computed whole, and no block is reported as
    cached."""
    engine = make()
    assert run(engine, ask())["a", 0] == run(engine, ask("b"))["b", 0] == alone
    assert engine.stats().cached_device_tokens == engine.stats().blocks_cached == 0
    assert engine.stats().prompt_tokens == 2 * len(PROMPT)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_that_starts_at_a_snapshot_gives_the_same_answer(
    make: Make, checkpoint: Path, deterministic: bool
) -> None:
    """A request has the same tokens, and with --deterministic log-probabilities of the same bits, whether its prompt is
    computed, starts at its own snapshot, or at one of a shared prefix, and after a preemption."""
    if deterministic:
        make = engines_of(load_model(checkpoint, communicator=Communicator(), device="cpu", deterministic=True))
    prompt = PROMPT + PROMPT[7:40] + PROMPT[3:]
    scored = replace(DRAWN, logprobs=3)

    def answer(engine: Engine, name: str) -> tuple[list[int], list[float], int]:
        """(tokens, log-probabilities if their bits count, cached tokens)"""
        engine.submit_request(ask(name, prompt, scored))
        outputs = []
        while engine.has_work:
            outputs += [output for output in engine.step().outputs if output.request_id == name]
            engine.check()
        logprobs = [top for output in outputs for entry in output.logprobs for _, top in entry.top]
        tokens = [token for output in outputs for token in output.token_ids]
        return tokens, logprobs if deterministic else [], outputs[0].cached_device_tokens

    cold = answer(make(), "cold")
    assert cold[2] == 0
    engine = make(budget=40, snapshots=4)
    assert answer(engine, "first") == cold
    assert answer(engine, "second") == (*cold[:2], 112)
    shared = make(snapshots=4)
    for name in ("x", "y"):
        run(shared, ask(name, prompt[:100] + [3 + ord(name)] * 30, GREEDY_ONE))
    assert answer(shared, "third") == (*cold[:2], 96)
    crowded = make(num_blocks=34, snapshots=2, depth=1)
    crowded.submit_request(ask("older", prompt[::-1], scored))
    assert answer(crowded, "younger")[:2] == cold[:2]
    assert crowded.stats().preemptions > 0


def test_choices_compute_their_own_prompts(make: Make, alone: list[int]) -> None:
    """Each of n choices has the tokens that it has beside no other choice."""
    sampling = SamplingParams(max_tokens=40, seed=7, ignore_eos=True, temperature=0.9, top_k=40, n=3)
    said = run(make(budget=50), ask(sampling=sampling))
    assert said["a", 0] == alone
    assert len({tuple(tokens) for tokens in said.values()}) == 3
    assert run(make(), ask(sampling=sampling, resume={0: tuple(alone[:39])}))["a", 2] == said["a", 2]


def test_prompt_logprobs_and_embeddings_are_of_the_whole_prompt(make: Make) -> None:
    """In chunks, on a slot that was used, and with two choices: the prompt is scored once, and the mean of its hidden
    states stays."""
    sampling = SamplingParams(max_tokens=4, seed=7, ignore_eos=True, prompt_logprobs=1, n=2)
    scored: list[list[float]] = []
    embedded: list[torch.Tensor] = []
    for budget in (256, 7):
        engine = make(budget=budget, slots=2)
        run(engine, ask("before", PROMPT[5:]))
        engine.submit_request(ask(sampling=sampling))
        engine.submit_request(ask("e", sampling=SamplingParams(max_tokens=1, seed=1), pooling=Pooling.MEAN))
        scores: list[float] = []
        while engine.has_work:
            for output in engine.step().outputs:
                assert not output.prompt_logprobs or (output.request_id, output.choice) == ("a", 0)
                scores.extend(entry.logprob for entry in output.prompt_logprobs)
                if output.embedding:
                    embedded.append(torch.tensor(output.embedding))
        scored.append(scores)
    assert len(scored[0]) == len(scored[1]) == len(PROMPT) - 1
    assert torch.allclose(torch.tensor(scored[0]), torch.tensor(scored[1]), atol=1e-4)
    assert len(embedded) == 2 and torch.allclose(embedded[0], embedded[1], atol=1e-4)


def test_int8_weights_are_served(checkpoint: Path, make: Make, alone: list[int]) -> None:
    """Linears quantised at load: decays and routers stay plain, and chunks change no token."""
    model = load_model(checkpoint, communicator=Communicator(), device="cpu", quantization="int8")
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)

    def tokens(budget: int) -> list[int]:
        pool = allocate_kv_pool(layout, 60, torch.device("cpu"))
        runner = ModelRunner(model, layout, pool, max_num_seqs=4, max_model_len=256)
        engine = Engine(model.spec, runner, num_blocks=60, block_size=8, max_num_seqs=4, max_batch_tokens=budget)
        return run(engine, ask())["a", 0]

    assert tokens(256) == tokens(7)
    assert model.spec.weight_bytes < load_model(checkpoint, communicator=Communicator(), device="cpu").spec.weight_bytes


def test_settings_that_do_not_fit_a_state_are_refused(model: Model) -> None:
    """Each refusal says what to change: heads on a GPU, a host tier, too many sequences, a tp that does not divide the
    heads."""
    config = GroupConfig(name="g", model="m", served_model_name="m", host_kv_memory=0.5)
    layer = DeltaNetSpec(0, key_heads=4, value_heads=8, key_dim=16, value_dim=32, conv_size=4)
    check_state_device("cuda", "qwen3_next", {}, [layer])
    check_state_device("cpu", "qwen3_next", {}, [replace(layer, key_dim=24)])
    with pytest.raises(InvalidConfig, match="powers of two from 16 on, .* .here: 24, 32.; set --device cpu"):
        check_state_device("cuda", "qwen3_next", {}, [replace(layer, key_dim=24)])
    with pytest.raises(InvalidConfig, match="leave --host-kv-memory out"):
        check_host_tier(model.spec.architecture, config.host_kv_memory, has_states=True)
    wanted = config.max_num_seqs * model.spec.state_bytes
    assert subtract_states(config, 2 * wanted + 5, wanted, 2) == 5
    with pytest.raises(InvalidConfig, match="states of 256 sequences take .* on each of 2 ranks.*; lower max-num-seqs"):
        subtract_states(config, 2 * wanted, wanted, 2)
    with pytest.raises(
        InvalidConfig, match="tp 3 does not divide the key heads of linear attention .4.; use a divisor"
    ):
        TpShard(0, 3).shard_state(layer)
    check_convolutions("qwen3_next", {}, [replace(layer, conv_size=8)])
    with pytest.raises(InvalidModel, match="linear_conv_kernel_dim 9 cannot be served: .* at most 8 tokens"):
        check_convolutions("qwen3_next", {}, [replace(layer, conv_size=9)])
    check_deterministic_states("qwen3_next", {}, [layer])
    with pytest.raises(InvalidConfig, match="multiples of 16 and at most 256 .here: 24, 32."):
        check_deterministic_states("qwen3_next", {}, [replace(layer, key_dim=24)])


def test_settings_that_do_not_fit_other_kinds_of_state() -> None:
    """Short convolutions and Mamba-2 are refused over ranks, --deterministic for sizes that C does not compute, and
    states on a GPU for sizes that Triton's kernels do not compute."""
    conv = ShortConvSpec(0, channels=32, conv_size=3)
    mamba = Mamba2Spec(0, heads=8, head_dim=16, groups=2, state_size=32, conv_size=4, norm_size=64)
    with pytest.raises(InvalidConfig, match="tp 2 would divide Mamba-2 mixers over ranks, .*; use tp 1"):
        TpShard(0, 2).shard_state(mamba)
    with pytest.raises(InvalidConfig, match="tp 2 would divide short convolutions over ranks, .*; use tp 1"):
        TpShard(0, 2).shard_state(conv)
    check_convolutions("lfm2", {}, [mamba, conv])
    with pytest.raises(InvalidModel, match="lfm2 with conv_L_cache 9 cannot be served: .* at most 8 tokens"):
        check_convolutions("lfm2", {}, [replace(conv, conv_size=9)])
    with pytest.raises(InvalidModel, match="bamba with hidden_act gelu cannot be served: .*; correct hidden_act,"):
        check_mixer_activation("bamba", "gelu")
    with pytest.raises(InvalidModel, match="with mamba_hidden_act relu2 cannot .*; correct mamba_hidden_act, if"):
        check_mixer_activation("nemotron_h", "relu2")
    scan = MambaSpec(0, channels=64, state_size=16, dt_rank=4, conv_size=4)
    assert TpShard(1, 2).shard_state(scan).matrix == (2, 16, 16)
    with pytest.raises(InvalidConfig, match="tp 3 does not divide the channels of the Mamba mixers .64."):
        TpShard(0, 3).shard_state(scan)
    check_state_device("cpu", "mamba", {}, [scan])
    with pytest.raises(InvalidConfig, match="selective scan. have no GPU kernel; set --device cpu"):
        check_state_device("cuda", "mamba", {}, [scan])
    check_deterministic_states("mamba", {}, [scan])
    with pytest.raises(InvalidConfig, match="Mamba mixers whose channels are a multiple of 16.* .here: 72, 16."):
        check_deterministic_states("mamba", {}, [replace(scan, channels=72)])
    lightning = LightningSpec(1, heads=8, head_dim=16)
    assert TpShard(1, 2).shard_state(lightning) == replace(lightning, heads=4, first_head=4)
    with pytest.raises(InvalidConfig, match="tp 3 does not divide the heads of lightning attention .8."):
        TpShard(0, 3).shard_state(lightning)
    check_deterministic_states("minimax", {}, [lightning])
    with pytest.raises(InvalidConfig, match="a head_dim that is a multiple of 16 .* .here: 24."):
        check_deterministic_states("minimax", {}, [replace(lightning, head_dim=24)])
    mixers = [mamba, replace(mamba, state_size=256, head_dim=80)]
    check_state_device("cuda", "bamba", {}, [*mixers, conv, replace(conv, channels=24)])
    for size in (8, 24, 512):
        check_state_device("cpu", "bamba", {}, [replace(mamba, state_size=size)])
        with pytest.raises(InvalidConfig, match=f"power of two from 16 to 256 .here: {size}.; set --device cpu"):
            check_state_device("cuda", "bamba", {}, [replace(mamba, state_size=size)])
    check_deterministic_states("bamba", {}, [mamba, conv])
    with pytest.raises(InvalidConfig, match="multiples of 16 .here: 24, 224, 64."):
        check_deterministic_states("bamba", {}, [replace(mamba, state_size=24)])
    with pytest.raises(InvalidConfig, match="multiple of 16 for short convolutions .here: 24."):
        check_deterministic_states("lfm2", {}, [replace(conv, channels=24)])


def test_a_group_starts_again_beside_groups_that_have_their_states(model: Model) -> None:
    """With kv-memory in bytes, only the states of the group's own ranks must be free: those of others are allocated."""
    wanted = 256 * model.spec.state_bytes
    config = GroupConfig(name="g", model="m", served_model_name="m", kv_memory=1e6)
    assert subtract_states(config, wanted + 5, wanted, 2) == 5
    share = GroupConfig(name="g", model="m", served_model_name="m", kv_memory=0.3)
    with pytest.raises(InvalidConfig, match="if other groups already run on this host, set kv-memory in bytes"):
        subtract_states(share, wanted + 5, wanted, 2)


def test_states_are_allocated_before_their_first_use(model: Model) -> None:
    """The pages of slots that no sequence had are taken from the host, so that a later group does not count them as
    free."""
    count = (64 << 20) // model.spec.state_bytes
    before = resident_bytes()
    states = make_states(model.spec, count, torch.device("cpu"))
    wait_until_populated()
    assert resident_bytes() - before > 60 << 20
    assert not any(tensor[-1].any() for state in states for tensor in state.tensors)


def test_states_that_the_system_refuses(model: Model) -> None:
    """States that this process cannot have, as with a small `ulimit -v`, are an error with the setting."""
    with pytest.raises(InvalidConfig, match="^max-num-seqs: the system refuses"):
        make_states(model.spec, 1 << 40, torch.device("cpu"))


def test_states_take_the_bytes_that_are_counted(model: Model) -> None:
    """The bytes of the states of a runner's slots are those that its spec says."""
    states = make_states(model.spec, 5, torch.device("cpu"))
    assert sum(tensor.nbytes for state in states for tensor in state.tensors) == 5 * model.spec.state_bytes
