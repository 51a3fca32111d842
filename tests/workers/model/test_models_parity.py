"""Every architecture gives transformers' own greedy tokens, at every tensor-parallel size."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import ARCHITECTURES, FURTHER_ARCHITECTURES, VOCAB, tiny_checkpoint
from tests.workers.ranks import run_ranks

MAX_TOKENS = 8
CHUNK = 16
# Longer than a window (16) and than several chunks, or shorter than both.
PROMPT_LENGTHS = (50, 7, 37)
# With longrope the whole of every prompt must lie past the original length, or transformers itself changes frequencies.
LONGROPE_LENGTHS = (50, 34, 40)

# The pairwise sample: every architecture alone, each kind of split at 2 or at 4 ranks (with 2 KV heads).
_SAMPLE = {
    2: (
        *("llama", "gemma2", "qwen3", "mixtral", "deepseek-v2-groups", "deepseek-v3-halves", "longcat-flash"),
        *("jamba", "kimi-linear", "mamba", "minimax"),
    ),
    4: ("qwen2", "phi3", "olmo2", "deepseek-v2", "deepseek-v3", "axk1", "falcon-mamba", "mimo-v2-flash", "olmo-hybrid"),
}
CASES = [
    pytest.param(arch, tp, marks=() if tp == 1 or arch in _SAMPLE[tp] else pytest.mark.full, id=f"{arch}-tp{tp}")
    for tp in (1, 2, 4)
    for arch in (*ARCHITECTURES, *FURTHER_ARCHITECTURES)
]


# By ranks and architecture: (--expert-parallel, --mla-shard). Four ranks run in full.
_DIVIDED: dict[int, dict[str, tuple[bool, str]]] = {
    2: {
        "axk1": (True, "tokens"),
        "glm4-moe-lite": (True, "replicate"),
        "kimi-linear": (True, "tokens"),
        "longcat-flash": (True, "tokens"),
        "mimo-v2-flash": (True, "replicate"),
        "youtu": (False, "tokens"),
    },
    4: {
        "axk1": (False, "tokens"),
        "glm4-moe-lite": (True, "tokens"),
        "kimi-linear": (False, "tokens"),
        "longcat-flash": (True, "replicate"),
        "mimo-v2-flash": (True, "replicate"),
        "youtu": (False, "tokens"),
    },
}


def prompts_of(arch: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(arch))
    lengths = LONGROPE_LENGTHS if "longrope" in arch else PROMPT_LENGTHS
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@cache
def expected(path: Path, arch: str) -> list[list[int]]:
    """The tokens of transformers.generate for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts_of(arch):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)  # type: ignore[misc]
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def load(path: Path, communicator: Communicator) -> Model:
    return load_model(path, communicator=communicator, dtype="float32", device="cpu")


def run_models(communicator: Communicator, paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The work of one rank: every architecture in one process group, because starting processes takes seconds."""
    outcomes = {}
    for arch, path in paths.items():
        model = load(path, communicator)
        driver = PagedDriver(model)
        outcomes[arch] = {
            "tokens": driver.greedy(prompts_of(arch), MAX_TOKENS, chunk=CHUNK),
            "weight_bytes": model.spec.weight_bytes,
            "block_bytes": driver.layout.bytes_per_block,
            "fingerprint": model.spec.fingerprint,
        }
    return outcomes


@pytest.fixture(scope="module")
def group_outcomes(request: pytest.FixtureRequest, checkpoint_directory: Path) -> Any:
    """Outcomes of all ranks by tp, computed at first use, for the architectures that this pytest session selected."""
    selected: dict[int, set[str]] = {}
    for item in request.session.items:
        if item.path == request.path and (params := getattr(item, "callspec", None)) and "tp" in params.params:
            selected.setdefault(params.params["tp"], set()).add(params.params.get("arch", "llama"))

    @cache
    def run(tp: int) -> list[dict[str, dict[str, Any]]]:
        paths = {arch: tiny_checkpoint(arch, checkpoint_directory) for arch in sorted(selected[tp] | {"llama"})}
        return [run_models(Communicator(), paths)] if tp == 1 else run_ranks(tp, run_models, paths)

    return run


@pytest.mark.parametrize(("arch", "tp"), CASES)
def test_greedy_tokens_equal_transformers(arch: str, tp: int, group_outcomes: Any, checkpoint_directory: Path) -> None:
    """Chunked prompts beside decodes give on every rank the tokens of each prompt alone."""
    wanted = expected(tiny_checkpoint(arch, checkpoint_directory), arch)
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)  # else mixed-up prompts would not show
    for rank, outcome in enumerate(group_outcomes(tp)):
        assert outcome[arch]["tokens"] == wanted, f"rank {rank}"


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_and_pool_shrink_with_ranks(tp: int, group_outcomes: Any) -> None:
    """A rank holds its part of the weights, and of the KV pool up to as many ranks as KV heads."""
    (alone,) = group_outcomes(1)
    ranks = group_outcomes(tp)
    whole = alone["llama"]
    norms = 7 * 64 * 4  # two a layer and the last, which every rank holds whole
    for outcome in ranks:
        here = outcome["llama"]
        assert here["block_bytes"] == whole["block_bytes"] // 2  # two KV heads: four ranks share them
        assert here["fingerprint"] == whole["fingerprint"]
        assert here["weight_bytes"] <= (whole["weight_bytes"] - norms) / tp * 1.05 + norms + 3 * 2 * 8 * 64 * 4
    replicated = 0 if tp == 2 else 3 * 2 * (2 * 8 * 64 * 4)  # K and V rows, held twice
    total = sum(outcome["llama"]["weight_bytes"] for outcome in ranks)
    assert total == whole["weight_bytes"] + (tp - 1) * norms + replicated


def run_divided(communicator: Communicator, paths: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The work of one rank: the tokens of every architecture with its experts or latents divided."""
    tokens = {}
    for arch, path in paths.items():
        expert_parallel, mla_shard = _DIVIDED[communicator.size][arch]
        model = load_model(
            path, communicator=communicator, dtype="float32", device="cpu", expert_parallel=expert_parallel,
            mla_shard=mla_shard,
        )  # fmt: skip
        tokens[arch] = PagedDriver(model).greedy(prompts_of(arch), MAX_TOKENS, chunk=CHUNK)
    return tokens


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_divided_experts_and_latents_give_the_same_tokens(tp: int, checkpoint_directory: Path) -> None:
    """Every newer type gives transformers' tokens with whole experts on ranks, and with latents divided by token."""
    paths = {arch: tiny_checkpoint(arch, checkpoint_directory) for arch in _DIVIDED[tp]}
    for found in run_ranks(tp, run_divided, paths):
        for arch, tokens in found.items():
            assert tokens == expected(paths[arch], arch), arch


def test_neighbours_do_not_move_longrope(checkpoint_directory: Path) -> None:
    """With longrope, a short sequence has the same logits alone and beside a long one."""
    model = load(tiny_checkpoint("phi3-longrope", checkpoint_directory), Communicator())
    short, long = prompts_of("phi3-longrope")[0][:9], prompts_of("phi3-longrope")[0]
    driver = PagedDriver(model)
    alone = driver.step([(driver.add_sequence(short, 1), 9)])
    together = driver.step([(driver.add_sequence(short, 1), 9), (driver.add_sequence(long, 1), 50)])
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-5)


def test_longrope_takes_short_factors_for_a_short_limit(checkpoint_directory: Path) -> None:
    """If max_model_len is at most the original length, logits are those of transformers for short prompts."""
    path = tiny_checkpoint("phi3-longrope", checkpoint_directory)
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu", max_model_len=32)
    prompt = prompts_of("phi3-longrope")[0][:20]
    driver = PagedDriver(model)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(driver.step([(driver.add_sequence(prompt, 1), 20)])[0], wanted, rtol=1e-4, atol=1e-4)


def test_dynamic_rope_stretches_when_asked(checkpoint_directory: Path) -> None:
    """With max_model_len twice its own length, a dynamic NTK model has transformers' frequencies for that length."""
    path = tiny_checkpoint("dynamic-rope", checkpoint_directory)
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu", max_model_len=512)
    assert model.spec.max_model_len == 512
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.randint(3, VOCAB, (512,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = PagedDriver(model)
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(driver.step([(driver.add_sequence(prompt, 1), 512)])[0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
def test_bfloat16_rounds_no_worse_than_transformers(arch: str, checkpoint_directory: Path) -> None:
    """In bfloat16 our logits differ from those in float32 about as much as transformers' bfloat16 logits do."""
    path = tiny_checkpoint(arch, checkpoint_directory)
    prompt = prompts_of(arch)[0]

    def reference(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([prompt])).logits[0].float()
        return logits

    driver = PagedDriver(load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu"))
    sequence = driver.add_sequence(prompt, 0)
    ours = torch.stack([driver.step([(sequence, 1)])[0] for _ in prompt])
    exact = reference(torch.float32)
    assert (ours - exact).square().mean() < 1.5 * (reference(torch.bfloat16) - exact).square().mean()
