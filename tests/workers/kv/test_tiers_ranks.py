"""Two tiers with a real model, on one rank and on two over gloo: blocks come back byte for byte."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.block_copier import CpuBlockCopier
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.ranks import run_ranks

BLOCKS, HOST_BLOCKS = 20, 60
PROMPT = [(i * 37 + 11) % (VOCAB - 3) + 3 for i in range(77)]  # nine blocks of 8 and a bit
FLOODS = [[(i * step + 5) % (VOCAB - 3) + 3 for i in range(120)] for step in (41, 43, 47)]
SAMPLING = SamplingParams(max_tokens=6, seed=2**40 + 9, ignore_eos=True, temperature=0.9)


class Vandal(ModelRunner):
    """A runner that flips a bit of its rank's host memory before the first restore."""

    def launch(self, plan: StepPlan) -> DeviceStep:
        """As a ModelRunner does."""
        if plan.restores and isinstance(self._copier, CpuBlockCopier) and not self.done:
            self.done = True
            self._copier.host[plan.restores[3][0], 100] ^= 4
        return super().launch(plan)

    done = False


def serve_prompts(
    communicator: Communicator, argument: tuple[Path, int | None, KvDtype], mla_shard: str = "replicate"
) -> dict[str, Any] | None:
    """A prompt, floods that evict it, and the prompt again. `vandal`: the rank that corrupts its memory."""
    path, vandal, kv_dtype = argument
    model = load_model(path, communicator=communicator, device="cpu", mla_shard=mla_shard)
    layout = BlockLayout.of(model.spec.layers, 8, kv_dtype)
    pool = allocate_kv_pool(layout, BLOCKS, torch.device("cpu"))
    copier = CpuBlockCopier(pool, allocate_host_pool(HOST_BLOCKS, layout.bytes_per_block, pool.device), communicator)
    kind = Vandal if communicator.rank == vandal else ModelRunner
    runner = kind(model, layout, pool, max_num_seqs=4, max_model_len=256, copier=copier)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group, seconds = TpRunner(runner, communicator), count()
    engine = Engine(
        model.spec,
        group,
        num_blocks=BLOCKS,
        block_size=8,
        max_num_seqs=4,
        max_batch_tokens=64,
        host_blocks=HOST_BLOCKS,
        clock=lambda: float(next(seconds)),  # so that no busy machine makes computing look cheaper than copying
    )
    said: dict[str, Any] = {}
    prompts = {"first": PROMPT, **{f"flood{i}": flood for i, flood in enumerate(FLOODS)}, "again": PROMPT}
    for name, prompt in prompts.items():
        engine.submit_request(EngineRequest(name, tuple(prompt), SAMPLING))
        said[name] = []
        while engine.has_work:
            for output in engine.step().outputs:
                said[name] += output.token_ids
                if output.cached_host_tokens >= 0:
                    said[f"{name} cached"] = (output.cached_device_tokens, output.cached_host_tokens)
            engine.check()
    group.stop_followers()
    stats = engine.stats()
    return {
        **said,
        "failures": stats.integrity_failures,
        "restores": stats.restores,
        "restore seconds": stats.restore_seconds,
    }


def serve_divided(
    communicator: Communicator, arguments: list[tuple[Path, int | None, KvDtype]]
) -> list[dict[str, Any] | None]:
    """`serve_prompts` with latents divided over the ranks, for each of `arguments`."""
    return [serve_prompts(communicator, argument, "tokens") for argument in arguments]


def serve_in_turn(communicator: Communicator, arguments: list[tuple[Path, int | None, KvDtype]]) -> list[Any]:
    """`serve_prompts` for each of `arguments`, by the same ranks."""
    return [serve_prompts(communicator, argument) for argument in arguments]


@pytest.fixture(scope="module")
def said_by(checkpoint_directory: Path) -> dict[tuple[int, int | None], dict[str, Any]]:
    """What `serve_prompts` returns on rank 0, by tp and vandal."""
    path = tiny_checkpoint("llama", checkpoint_directory)
    said: dict[tuple[int, int | None], dict[str, Any]] = {}
    for tp, vandals in ((1, [None, 0]), (2, [None, 0, 1])):
        arguments = [(path, vandal, KvDtype.FLOAT32) for vandal in vandals]
        answers = serve_in_turn(Communicator(), arguments) if tp == 1 else run_ranks(tp, serve_in_turn, arguments)[0]
        said.update({(tp, vandal): answer for vandal, answer in zip(vandals, answers, strict=True)})
    return said


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_come_back_byte_for_byte(said_by: dict[tuple[int, int | None], dict[str, Any]], tp: int) -> None:
    """A prompt whose blocks were demoted and restored on every rank gets the same answer."""
    said = said_by[tp, None]
    assert said["again"] == said["first"] and len(said["first"]) == 6
    assert said["again cached"] == (0, 72) and said["restores"] == 9
    assert said["failures"] == 0 and said["restore seconds"] > 0


def test_quantised_blocks_move_as_they_are(checkpoint_directory: Path) -> None:
    """Elements and scales are moved together, so a restored int8 block equals the demoted one."""
    said = serve_prompts(Communicator(), (tiny_checkpoint("llama", checkpoint_directory), None, KvDtype.INT8))
    assert said is not None
    assert said["again"] == said["first"] and said["again cached"] == (0, 72)


@pytest.mark.parametrize("arch", ["longcat-flash", "mimo-v2-flash"])
def test_blocks_of_uneven_layers_move_as_they_are(arch: str, checkpoint_directory: Path) -> None:
    """Two layers of latents for each decoder layer, or more KV heads in some layers and padded values: restored blocks
    give the tokens of demoted ones."""
    said = serve_prompts(Communicator(), (tiny_checkpoint(arch, checkpoint_directory), None, KvDtype.FLOAT32))
    assert said is not None
    assert said["again"] == said["first"] and said["again cached"] == (0, 72)


@pytest.mark.parametrize("vandal", [None, 0])
def test_latents_move_as_other_blocks_do(vandal: int | None, checkpoint_directory: Path) -> None:
    """Blocks of fp8 latents, rotary keys and scales come back as they were; a flipped bit in one of them is a miss."""
    path = tiny_checkpoint("deepseek-v3", checkpoint_directory)
    said = serve_prompts(Communicator(), (path, vandal, KvDtype.FP8))
    assert said is not None
    assert said["again"] == said["first"]
    assert said["again cached"] == ((0, 72) if vandal is None else (0, 24))
    assert said["failures"] == (vandal is not None)


def test_divided_latents_move_as_other_blocks_do(checkpoint_directory: Path) -> None:
    """Where each rank stores half of a block's tokens, every rank moves its part: the prompt gets the same answer from
    demoted and restored blocks, and a bit flipped on one rank makes the block a miss on all."""
    path = tiny_checkpoint("deepseek-v3", checkpoint_directory)
    arguments = [(path, vandal, KvDtype.FP8) for vandal in (None, 1)]
    whole, flipped = run_ranks(2, serve_divided, arguments)[0]
    assert whole["again"] == whole["first"] == flipped["again"] and len(whole["first"]) == 6
    assert whole["again cached"] == (0, 72) and whole["failures"] == 0
    assert flipped["again cached"] == (0, 24) and flipped["failures"] == 1


@pytest.mark.parametrize(("tp", "vandal"), [(1, 0), (2, 0), (2, 1)])
def test_a_flipped_bit_is_a_miss(said_by: dict[tuple[int, int | None], dict[str, Any]], tp: int, vandal: int) -> None:
    """A bit flipped in one rank's host memory is counted, and the prompt is computed from there on."""
    said = said_by[tp, vandal]
    assert said["again"] == said["first"]
    assert said["failures"] == 1
    assert said["again cached"] == (0, 24)
