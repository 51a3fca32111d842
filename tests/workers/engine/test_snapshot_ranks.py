"""Snapshots of states on two real ranks: they change no bit, and nothing of them is left when a rank is killed."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import load_model
from coatcheck.workers.rank import Rank
from coatcheck.workers.rank_loading import LoadedRank
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.rank_client import generate, read_load
from tests.workers.rank_group import RankGroup
from tests.workers.ranks import run_ranks

SHARED = [(i * 37 + 11) % (VOCAB - 3) + 3 for i in range(100)]
SAMPLING = SamplingParams(max_tokens=66, seed=2**40 + 9, ignore_eos=True, temperature=0.9, logprobs=2)
Said = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_directory: Path) -> Path:
    return tiny_checkpoint("qwen3.5", checkpoint_directory)


def serve_turns(communicator: Communicator, argument: tuple[Path, bool]) -> dict[str, Any] | None:
    """On rank 0, tokens, log-probabilities and cached tokens of two turns and a prompt with a shared start, from a cold
    cache each and then from snapshots. The last one is on a pool so small that sequences are preempted."""
    path, deterministic = argument
    model = load_model(
        path,
        communicator=communicator,
        device="cpu",
        dtype="bfloat16" if deterministic else "float32",
        deterministic=deterministic,
    )
    layout = BlockLayout.of(model.spec.layers, 8, choose_kv_dtype("auto", model.spec.dtype))
    pool = allocate_kv_pool(layout, 90, torch.device("cpu"))
    runner = ModelRunner(model, layout, pool, max_num_seqs=4, max_model_len=256, num_snapshots=4)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator) if communicator.size > 1 else runner

    def make_engine(num_blocks: int = 90, num_snapshots: int = 4) -> Engine:
        return Engine(
            model.spec, group, num_blocks=num_blocks, block_size=8, max_num_seqs=4, max_batch_tokens=48,
            num_snapshots=num_snapshots,
        )  # fmt: skip

    def ask(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, tuple[Said, int]]:
        said: dict[str, Said] = {name: ([], []) for name in prompts}
        cached: dict[str, int] = {}
        for name, prompt in prompts.items():
            sampling = SAMPLING if name != "second" else dataclasses.replace(SAMPLING, max_tokens=12)
            engine.submit_request(EngineRequest(name, tuple(prompt), sampling))
        while engine.has_work:
            for output in engine.step().outputs:
                cached.setdefault(output.request_id, output.cached_device_tokens)
                tokens, logprobs = said[output.request_id]
                tokens += output.token_ids
                logprobs += [value for one in output.logprobs for _, value in one.top]
            engine.check()
        return {name: (said[name], cached[name]) for name in prompts}

    first = ask(make_engine(num_snapshots=0), {"first": SHARED})["first"]
    prompts = {"first": SHARED, "other": SHARED + SHARED[::-1][:30], "second": SHARED + first[0][0] + SHARED[:20]}
    cold = {name: ask(make_engine(num_snapshots=0), {name: prompts[name]})[name] for name in ("other", "second")}
    cold["first"] = first
    warm_engine = make_engine()
    warm = {name: ask(warm_engine, {name: prompt})[name] for name, prompt in prompts.items()}
    crowded_engine = make_engine(num_blocks=28, num_snapshots=1)
    crowded = ask(crowded_engine, prompts)
    if communicator.size > 1:
        group.stop_followers()  # type: ignore[union-attr]
    return {"cold": cold, "warm": warm, "crowded": crowded, "preemptions": crowded_engine.stats().preemptions}


def serve_both_ways(communicator: Communicator, path: Path) -> list[dict[str, Any] | None]:
    """`serve_turns` in float32, and in bfloat16 with --deterministic."""
    return [serve_turns(communicator, (path, deterministic)) for deterministic in (False, True)]


def test_prompts_that_start_at_snapshots_give_the_same_answers_on_two_ranks(checkpoint: Path) -> None:
    """Each rank copies its heads' states: from the snapshot of a prompt or of an answer, two ranks give the tokens of a
    cold cache, which in float32 are those of one rank. With --deterministic log-probabilities have the same bits, also
    beside others and after a preemption."""
    plain, deterministic = run_ranks(2, serve_both_ways, checkpoint)[0]
    for said in (plain, deterministic):
        assert {name: cached for name, (_, cached) in said["warm"].items()} == {"first": 0, "second": 160, "other": 96}
        assert {name: tokens for name, ((tokens, _), _) in said["warm"].items()} == {
            name: tokens for name, ((tokens, _), _) in said["cold"].items()
        }
        assert said["preemptions"] > 0
    assert {name: (bits, 0) for name, (bits, _) in deterministic["warm"].items()} == deterministic["cold"]
    crowded = {name: bits for name, (bits, _) in deterministic["crowded"].items()}
    assert crowded == {name: bits for name, (bits, _) in deterministic["cold"].items()}
    alone = serve_turns(Communicator(), (checkpoint, False))
    assert alone is not None
    for name, ((tokens, _), _) in plain["cold"].items():
        assert alone["warm"][name][0][0] == tokens


class HalfCopyingRunner:
    """Its process is killed once it has copied a part of the states to a snapshot."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> DeviceStep:
        """As a ModelRunner does, up to the second layer's copy."""
        if plan.state_saves:
            whole = RecurrentState.copy_slots
            copied: list[RecurrentState] = []

            def copy_one(state: RecurrentState, pairs: list[tuple[int, int]]) -> None:
                if copied:
                    os.kill(os.getpid(), signal.SIGKILL)
                whole(state, pairs)
                copied.append(state)

            RecurrentState.copy_slots = copy_one  # type: ignore[method-assign,assignment]
        return self._runner.launch(plan)


class HalfCopyingRank(Rank):
    """A rank that is killed amid its first copy to a snapshot, if it is the last of its group."""

    def _load(self, communicator: Communicator, device: torch.device) -> LoadedRank:
        loaded = super()._load(communicator, device)
        if self.rank < self.config.tp - 1:
            return loaded
        return dataclasses.replace(loaded, runner=HalfCopyingRunner(loaded.runner))  # type: ignore[arg-type]


def test_nothing_is_found_of_a_copy_in_which_a_rank_was_killed(checkpoint: Path) -> None:
    """The whole group ends. Started again, it finds no snapshot, saves its own and answers from it with the same
    tokens."""
    config = GroupConfig(
        "g", str(checkpoint), "tiny", tp=2, kv_memory=4 << 20, dtype="float32", device="cpu", threads=1, max_num_seqs=4
    )
    group = RankGroup(config, HalfCopyingRank)
    try:
        with pytest.raises(grpc.RpcError):
            generate(group.wait_ready(), SHARED, 8)
        assert group.exit_codes() == [1, -signal.SIGKILL]
    finally:
        group.kill()
    again = RankGroup(config)
    try:
        address = again.wait_ready()
        answers, cached = [], []
        for _ in range(2):
            answers.append(generate(address, SHARED, 8))
            with grpc.insecure_channel(address) as channel:
                cached.append(read_load(channel).status.cached_device_tokens)
        assert answers[0] == answers[1] and cached == [0, 96]
    finally:
        again.kill()
