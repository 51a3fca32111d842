"""Experts of published checkpoints stay quantised in memory, and give the tokens of their dequantised weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoint.claimed_gpu import cpu_as_gpu
from tests.workers.checkpoint.expert_checkpoints import write_pair
from tests.workers.quantised_checkpoints import EXPERT_CASES
from tests.workers.ranks import run_ranks

# The experts of these formats are decoded: groups of columns in any order, and NF4.
DECODED = ("gptq-act-order", "nf4")
PROMPT = [3 + 7 * place % 190 for place in range(30)]


def rank_greedy(communicator: Communicator, argument: tuple[Path, bool]) -> list[int]:
    """What one rank of a group computes; with the flag it holds whole experts."""
    path, expert_parallel = argument
    model = load_model(path, communicator=communicator, dtype="float32", device="cpu", expert_parallel=expert_parallel)
    return PagedDriver(model).greedy([PROMPT], 8, chunk=16)[0]


@pytest.mark.parametrize(("family", "kind"), EXPERT_CASES)
def test_tokens_are_those_of_transformers_and_bytes_those_of_the_plan(family: str, kind: str, tmp_path: Path) -> None:
    """60 greedy tokens equal those of transformers with the dequantised weights. The rank reports the bytes that the
    plan counts, on a GPU too; they are far below those of plain experts."""
    quantised, plain = write_pair(family, kind, tmp_path)
    model = load_model(quantised, communicator=Communicator(), dtype="float32", device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    reference.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)  # type: ignore[misc]
    assert PagedDriver(model).greedy([PROMPT], 60, chunk=16)[0] == wanted[0, 30:].tolist()
    with cpu_as_gpu():
        on_gpu = load_model(quantised, communicator=Communicator(), dtype="float32", device="cpu")
    for device, loaded in (("cpu", model), ("cuda", on_gpu)):
        planned = Sizing.of(PlanSettings(model=str(quantised), dtype="float32", device=device))  # type: ignore[arg-type]
        assert planned.weight_bytes == loaded.spec.weight_bytes
    experts = sum(tensor.nbytes for name, tensor in reference.named_parameters() if ".experts." in name)
    saved = 4 * model.spec.num_weights - model.spec.weight_bytes
    assert (saved > 0.6 * experts) == (kind not in DECODED)


@pytest.mark.parametrize(("family", "kind"), [("gpt-oss", "mxfp4"), ("qwen3-moe", "awq")])
def test_ranks_hold_their_parts_of_quantised_experts(family: str, kind: str, tmp_path: Path) -> None:
    """Two ranks give the tokens of one, with a part of each expert, which cuts blocks, and with whole experts."""
    quantised, _ = write_pair(family, kind, tmp_path)
    alone = rank_greedy(Communicator(), (quantised, False))
    for expert_parallel in (False, True):
        assert run_ranks(2, rank_greedy, (quantised, expert_parallel)) == [alone, alone]
