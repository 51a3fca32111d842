"""Latents divided over ranks by token (--mla-shard tokens): transformers' tokens, cached prefixes, tiers, refusals."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coatcheck.bench.setup.max_wait import MAX_PROGRAM_SECONDS
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.attention.token_shards import (
    count_local_keys,
    exchanged_elements,
    gathers_context,
    list_blocks,
    local_queries,
    local_slots,
    localise,
)
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model import latent_attention
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.ranks import run_ranks

MAX_TOKENS = 8
LATENT = LayerSpec(4, 1, 48, v_head_dim=0, rope_head_dim=16)
# One prompt is longer than several chunks, one has fewer tokens than there are ranks.
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (50, 3, 37)
]


def as_kimi(path: Path) -> Path:
    """The checkpoint under the model_type of Kimi K2, which is deepseek_v3 without groups of experts."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    return path


def load(path: Path, communicator: Communicator, **settings: Any) -> Model:
    return load_model(
        path, communicator=communicator, device="cpu", **{"dtype": "float32", "mla_shard": "tokens", **settings}
    )


@cache
def expected(path: Path) -> list[list[int]]:
    """The tokens of transformers.generate for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)[0, len(prompt) :].tolist()  # type: ignore[misc]
        for prompt in PROMPTS
    ]


def run_models(communicator: Communicator, paths: list[Path]) -> list[dict[str, Any]]:
    """One rank's part: each checkpoint's tokens in both forms of attention, and over a cached prefix."""
    outcomes = []
    for path in paths:
        model = load(path, communicator)
        driver = PagedDriver(model)
        outcome: dict[str, Any] = {
            "bytes": driver.layout.bytes_per_block,
            "mixed": driver.greedy(PROMPTS, MAX_TOKENS, chunk=16),
            "whole": driver.greedy(PROMPTS, MAX_TOKENS, chunk=64),
        }
        first = driver.add_sequence(PROMPTS[0], 0)
        cold = driver.step([(first, len(PROMPTS[0]))])[0]
        again = driver.add_sequence(PROMPTS[0], 0, prefix_of=first)
        outcome["computed"] = again.computed
        warm = driver.step([(again, len(PROMPTS[0]) - again.computed)])[0]
        outcome["cached"] = float((warm - cold).abs().max())
        prefers = latent_attention.prefers_expanded
        for form in (False, True):
            latent_attention.prefers_expanded = lambda *_, form=form: form  # type: ignore[misc]
            outcome[f"expanded {form}"] = driver.greedy(PROMPTS[:2], MAX_TOKENS, chunk=16)
        latent_attention.prefers_expanded = prefers
        outcomes.append(outcome)
    return outcomes


@pytest.mark.parametrize(("tp", "share_memory"), [(2, False), (4, True)])
def test_greedy_tokens_equal_transformers(tp: int, share_memory: bool, tmp_path: Path) -> None:
    """DeepSeek V2 and V3 and Kimi K2 at two ranks over gloo and at four: in chunks, in both forms, cached as cold; and
    a rank's block has a part of the bytes."""
    plain: dict[str, Any] = dict(n_group=1, topk_group=1)
    paths = {
        arch: tiny_checkpoint(arch.removesuffix("-kimi"), tmp_path / arch, **(plain if "kimi" in arch else {}))
        for arch in ("deepseek-v2", "deepseek-v3", "deepseek-v3-kimi")
    }
    wanted = [expected(path) for path in paths.values()]
    as_kimi(paths["deepseek-v3-kimi"])
    for outcomes in run_ranks(tp, run_models, list(paths.values()), share_memory=share_memory):
        for outcome, tokens in zip(outcomes, wanted, strict=True):
            assert outcome["mixed"] == tokens
            assert outcome["whole"] == tokens
            assert outcome["expanded True"] == outcome["expanded False"] == tokens[:2]
            assert outcome["computed"] == 48 and outcome["cached"] < 1e-4
    for path, outcome in zip(paths.values(), outcomes, strict=True):
        replicated = load(path, Communicator(), mla_shard="replicate")
        # Each of a block's parts is padded to 64 bytes.
        assert outcome["bytes"] * tp <= PagedDriver(replicated).layout.bytes_per_block + 64 * tp * 2 * 4


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_gathered_contexts_give_the_tokens_of_one_rank(tmp_path: Path, kv_dtype: str) -> None:
    """With a GPU's kernels, steps with prompts gather the latents, in all layers but the last, which computes few rows;
    decodes exchange queries. At tp 2 and 4 every step has the tokens of tp 1."""
    layers = 2
    path = tiny_checkpoint("deepseek-v3", tmp_path, num_hidden_layers=layers, first_k_dense_replace=layers)
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.model.gathered_contexts", str(path), kv_dtype],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [tokens for tokens, _ in found["2"]] == [tokens for tokens, _ in found["4"]]
    assert [tokens for tokens, _ in found["2"]] == [tokens for tokens, _ in found["1"]]
    gathered = [layers - 1, 0, layers - 1, layers - 1]
    assert {tp: [count for _, count in steps] for tp, steps in found.items()} == {
        "1": [0] * 4, "2": gathered, "4": gathered
    }  # fmt: skip


def test_fewer_bytes_decide_between_gathering_and_exchanging() -> None:
    """DeepSeek-V3 at tp 8: prompts gather, also behind a long prefix; decodes, a short chunk behind a long prefix, and
    contexts beyond the bound exchange."""
    layer = TpShard(3, 8, divides_latents=True).shard_layer(LayerSpec(128, 1, 576, v_head_dim=0, rope_head_dim=64))
    cases = {
        ((2048,), (2048,)): True,
        ((2048,), (100_000,)): True,
        ((600,), (100_000,)): False,
        ((1,) * 64, (8_000,) * 64): False,
        ((1,) * 4 + (2044,), (8_000,) * 4 + (2044,)): True,
        ((2048,), (131_072,)): False,
    }
    for (q_lens, seq_lens), gathers in cases.items():
        assert gathers_context(q_lens, seq_lens, layer, 131_072) is gathers
    assert exchanged_elements(2048, layer) * 2 == 2048 * 128 * (576 + 512) * 2
    assert list_blocks([17, 0, 16], 16) == [(0, 0), (0, 1), (2, 0)]


def test_every_token_is_stored_once(tmp_path: Path) -> None:
    """Over all ranks each slot is one rank's, and a rank's slots of a block are 0 to block_size / tp - 1 of it."""
    slots = torch.tensor([-1, *range(16, 32), 40])
    layers = [TpShard(rank, 4, divides_latents=True).shard_layer(LATENT) for rank in range(4)]
    parts = torch.stack([local_slots(slots, layer) for layer in layers])
    assert (parts >= 0).sum(0).tolist() == [0, *[1] * 17]
    assert parts.amax(0).tolist() == [-1, *(slot // 4 for slot in range(16, 32)), 10]


@pytest.mark.parametrize("shards", [2, 8])
def test_local_lengths_add_up(shards: int) -> None:
    """The ranks' local keys of each query add up to its context, on the device and on the host, in decodes, chunks,
    whole prompts and padding rows."""
    q_lens, seq_lens = [1, 5, 3, 0, 1], [1, 5, 21, 9, 0]
    lens = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    tables = torch.arange(len(q_lens), dtype=torch.int32)[:, None]
    metadata = AttentionMetadata(torch.arange(10), tables, torch.tensor(seq_lens, dtype=torch.int32), lens)
    total = torch.zeros(10, dtype=torch.int32)
    for rank in range(shards):
        layer = TpShard(rank, shards, divides_latents=True).shard_layer(LayerSpec(8, 1, 48, 0, 0.0, 0, 16))
        local = local_queries(metadata, layer, 10)
        assert local.seq_lens.tolist() == count_local_keys(q_lens, seq_lens, layer)
        assert local.block_tables[:, 0].tolist() == [0, 1, 1, 1, 1, 1, 2, 2, 2, 4]
        total += local.seq_lens
    assert total.tolist() == [1, 1, 2, 3, 4, 5, 19, 20, 21, 0]


def test_each_query_has_its_own_sequence_s_table() -> None:
    """Also in a captured step, which has as many sequences as tokens: a chunk of two, a decode, and empty ones."""
    lens = torch.tensor([7, 0, 12, 0], dtype=torch.int32)
    tables = torch.arange(4, dtype=torch.int32)[:, None]
    starts = torch.tensor([0, 2, 3, 4, 4], dtype=torch.int32)
    metadata = AttentionMetadata(torch.tensor([5, 6, -1, 11]), tables, lens, starts)
    made = localise(metadata, TpShard(1, 4, divides_latents=True).shard_layer(LATENT))
    assert made.local is not None
    assert made.local.block_tables[:, 0].tolist() == [0, 0, 1, 2]
    assert made.local.seq_lens.tolist() == [2, 2, 0, 3]
    assert made.slot_mapping.tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize("kv_dtype", [KvDtype.BFLOAT16, KvDtype.FP8])
def test_eight_ranks_store_the_cache_once(kv_dtype: KvDtype) -> None:
    """With the published sizes eight ranks together store little more than one rank alone would."""
    layer = LayerSpec(128, 1, 512 + 64, v_head_dim=0, rope_head_dim=64)
    whole = BlockLayout.of([layer] * 61, 64, kv_dtype)
    part = BlockLayout.of([TpShard(3, 8, divides_latents=True).shard_layer(layer)] * 61, 64, kv_dtype)
    assert whole.bytes_per_block <= 8 * part.bytes_per_block <= 1.01 * whole.bytes_per_block


def test_a_block_that_cannot_be_divided_is_refused() -> None:
    """The message names tp, the block size and what to use."""
    layer = TpShard(0, 3, divides_latents=True).shard_layer(LayerSpec(6, 1, 48, v_head_dim=0, rope_head_dim=16))
    with pytest.raises(InvalidConfig, match=r"tp 3 does not divide block-size 16; use a block-size that is a multiple"):
        BlockLayout.of([layer], 16, KvDtype.BFLOAT16)


def test_other_attention_is_not_divided() -> None:
    """Layers without latents keep every token on every rank."""
    assert TpShard(0, 2, divides_latents=True).shard_layer(LayerSpec(4, 2, 16)).token_shards == 1
