"""What a model takes and what fits: figures that anybody can check by hand, from configs alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coatcheck.cluster.planner.lengths import LengthDistribution
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.model_spec import LayerSpec
from tests.cluster.model_configs import DEEPSEEK, LLAMA, write_config

GIB = 2**30


def size(directory: Path, base: dict[str, Any] = LLAMA, config: dict[str, Any] | None = None, **flags: Any) -> Any:
    """The sizing's JSON."""
    model = write_config(directory, base, **(config or {}))
    return Sizing.of(PlanSettings.build({"model": model, "gpu_memory": "2000GiB", **flags})).to_json()


def test_a_token_of_32_layers_with_8_heads_of_128(tmp_path: Path) -> None:
    """In bf16 it is 131,072 bytes; 8,192 tokens are 1 GiB, and 64 such sequences 64 GiB."""
    found = size(tmp_path, context=8192, concurrency=64)
    assert found["bytes_per_token"] == 131_072
    assert found["layers"] == [
        dict(count=32, kv_heads=8, head_dim=128, value_dim=128, sliding_window=0)
        | dict(bytes_per_token=4096, rank_bytes_per_token=4096)
    ]
    assert (found["sequence_bytes"], found["concurrent_bytes"]) == (GIB, 64 * GIB)


def test_fewer_kv_heads_side_by_side(tmp_path: Path) -> None:
    """With 32 query heads, 16 sequences of 8,192 tokens: MHA takes 64 GiB, GQA-8 16, MQA 2."""
    found = size(tmp_path, context=8192, concurrency=16)["variants"]
    taken = {variant["name"]: variant["concurrent_bytes"] / GIB for variant in found}
    assert taken == {"MHA": 64, "GQA-8, its own": 16, "MQA": 2}


@pytest.mark.parametrize(("kv_dtype", "share"), [("fp8", 2), ("int8", 2), ("int4", 4)])
def test_quantised_elements(tmp_path: Path, kv_dtype: str, share: int) -> None:
    """fp8 and int8 halve and int4 quarters the elements; two fp16 scales for each layer, head and token are beside."""
    found = size(tmp_path, kv_dtype=kv_dtype)
    scales = 32 * 8 * 2 * 2
    assert found["scale_bytes_per_token"] == scales
    assert found["bytes_per_token"] - scales == 131_072 / share
    by_name = {row["kv_dtype"]: row["bytes_per_token"] for row in found["kv_dtypes"]}
    assert by_name[kv_dtype] == found["bytes_per_token"] and by_name["bf16"] == by_name["fp16"] == 131_072


def test_reading_2_gib_takes_640_microseconds(tmp_path: Path) -> None:
    """64 layers × 8 × 128 at 8,192 tokens are 2 GiB, which take about 640 µs at 3.35 TB/s."""
    found = size(tmp_path, config=dict(num_hidden_layers=64), context=8192, bandwidth="3.35TB/s")
    assert found["sequence_bytes"] == 2 * GIB
    assert found["step_times"][0]["batch"] == 1
    assert found["step_times"][0]["kv_seconds"] == pytest.approx(640e-6, rel=0.01)


def test_llama_3_70b_at_128k_tokens(tmp_path: Path) -> None:
    """80 layers of 8 KV heads at 131,072 tokens are 40 GiB, and a context that the model has not is noted."""
    shape = dict(num_hidden_layers=80, num_attention_heads=64, hidden_size=8192, intermediate_size=28672)
    found = size(tmp_path, config=shape | dict(max_position_embeddings=8192), context=131_072, tp=8)
    assert found["sequence_bytes"] == 40 * GIB
    assert found["rank_sequence_bytes"] == 5 * GIB
    assert found["notes"] == ["the model's maximum in config.json is 8,192 tokens; the context is 131,072"]
    assert found["weight_bytes"] == pytest.approx(70.55e9 * 2, rel=0.001)


def test_80_layers_of_64_heads_at_4k_tokens(tmp_path: Path) -> None:
    """Every head with its own keys: 10 GiB."""
    shape = dict(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=64, hidden_size=8192)
    assert size(tmp_path, config=shape, context=4096)["sequence_bytes"] == 10 * GIB


def test_deepseeks_latent_cache(tmp_path: Path) -> None:
    """Where the cache is latent, a token takes kv_lora_rank + qk_rope_head_dim elements a layer, on every rank."""
    found = size(tmp_path, DEEPSEEK, tp=8)
    assert found["bytes_per_token"] == found["rank_bytes_per_token"] == 61 * (512 + 64) * 2
    assert found["copies"] == 8
    latent, every_head = found["variants"][1], found["variants"][0]
    assert latent["bytes_per_token"] == found["bytes_per_token"]
    assert every_head["bytes_per_token"] == 61 * 128 * (128 + 64 + 128) * 2
    assert found["weight_bytes"] / 2 == pytest.approx(671e9, rel=0.01)
    assert any("every rank of tp holds the latents" in note for note in found["notes"])
    divided = size(tmp_path, DEEPSEEK, tp=8, mla_shard="tokens")
    assert divided["rank_bytes_per_token"] * 8 == divided["bytes_per_token"] == found["bytes_per_token"]
    assert divided["num_blocks"] // 8 == found["num_blocks"]
    assert any("divide the tokens of each block" in note for note in divided["notes"])


def test_a_backend_that_cannot_serve_the_model_is_refused(tmp_path: Path) -> None:
    """The plan names the backend, and refuses one that reads no latents or no quantised pool."""
    assert size(tmp_path, LLAMA)["attention_backend"] == "triton"
    assert size(tmp_path, LLAMA, attention_backend="flashinfer")["attention_backend"] == "flashinfer"
    with pytest.raises(InvalidConfig, match="does not read latent caches"):
        size(tmp_path, DEEPSEEK, attention_backend="fa3")
    with pytest.raises(InvalidConfig, match="a pool of kv-dtype int8"):
        size(tmp_path, attention_backend="fa3", kv_dtype="int8")


@pytest.mark.parametrize(("linear", "elements"), [("self_attn.q_proj", 4096 + 256), ("mamba.x_proj", 2048 + 512)])
@pytest.mark.parametrize(("device", "element_size"), [("cuda", 2), ("cpu", 4)])
def test_adapters_are_beside_the_weights(
    tmp_path: Path, device: str, element_size: int, linear: str, elements: int
) -> None:
    """GPUs hold A and B in the model's dtype, CPUs as float32. Two ranks divide the rows of a q_proj's B, and the
    columns of A of Mamba's x_proj."""
    prefix = f"base_model.model.model.layers.0.{linear}"
    shapes = {f"{prefix}.lora_A.weight": (8, 4096), f"{prefix}.lora_B.weight": (512, 8)}
    tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    found = size(tmp_path, device=device, tp=2, lora_modules=f"sql={tmp_path}")
    assert found["rank_adapter_bytes"] == element_size * 8 * elements
    plain = size(tmp_path, device=device, tp=2)
    assert found["rank_weight_bytes"] == plain["rank_weight_bytes"] + found["rank_adapter_bytes"]


def test_deepseeks_cache_of_every_head(tmp_path: Path) -> None:
    """Where it is not latent, every head's key and value are stored, divided among the ranks."""
    found = size(tmp_path, DEEPSEEK, tp=8, latent=False)
    assert found["bytes_per_token"] == 61 * 128 * (128 + 64 + 128) * 2
    assert found["rank_bytes_per_token"] * 8 == found["bytes_per_token"]


def test_ranks_beyond_the_kv_heads_hold_copies(tmp_path: Path) -> None:
    """8 KV heads on 16 ranks: each rank holds one, so all ranks together hold everything twice."""
    found = size(tmp_path, tp=16)
    assert found["rank_bytes_per_token"] == 131_072 / 8
    assert found["copies"] == 2
    assert "tp 16 is larger than the number of KV heads: 2 ranks hold each head" in found["notes"]


def test_sliding_windows_are_stored_whole_and_read_in_part(tmp_path: Path) -> None:
    """The pool keeps every token of a windowed layer; what a windowed cache would take, and what is read, is less."""
    gemma = dict(
        model_type="gemma3_text", sliding_window=1024, num_hidden_layers=12, num_key_value_heads=8, head_dim=128
    )
    found = size(tmp_path, config=gemma, context=8192)
    assert [(kind["count"], kind["sliding_window"]) for kind in found["layers"]] == [(10, 1024), (2, 0)]
    assert found["sequence_bytes"] == 12 * 4096 * 8192
    # 1,024 tokens lie in 65 blocks of 16 when they begin inside of one.
    assert found["windowed_sequence_bytes"] == 2 * 4096 * 8192 + 10 * 4096 * 65 * 16
    read = 4096 * (2 * 8192 + 10 * 1024)
    assert found["step_times"][0]["kv_seconds"] == pytest.approx(read / 3.35e12)
    assert any("sliding window" in note for note in found["notes"])


def test_what_fits_is_what_the_weights_leave(tmp_path: Path) -> None:
    """A share of the memory beside the weights becomes blocks, as at a rank's start; sequences take whole blocks."""
    found = size(tmp_path, gpu_memory="80GiB", kv_memory="0.5", context=1000, concurrency=64)
    blocks = (80 * GIB - found["rank_weight_bytes"]) // 2 // found["rank_bytes_per_block"]
    assert found["num_blocks"] == blocks
    assert found["sequences"] == blocks // 63
    assert found["fits"] is (found["sequences"] >= 64)
    assert found["longest_context"] == blocks // 64 * 16


def test_an_expert_is_read_when_it_is_chosen(tmp_path: Path) -> None:
    """One sequence reads the experts of one token, many sequences nearly all, and never more than there are."""
    experts = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    found = size(tmp_path, config=experts, concurrency=4096)
    one, most = found["step_times"][0], next(row for row in found["step_times"] if row["batch"] == 4096)
    read, all_weights = one["weights_seconds"] * 3.35e12, found["weight_bytes"]
    expert = 32 * 3 * 4096 * 14336 * 2
    table = 128256 * 4096 * 2  # of the embedding a step reads rows alone
    assert all_weights - table - read == pytest.approx(6 * expert, rel=1e-6)
    assert most["weights_seconds"] * 3.35e12 == pytest.approx(all_weights - table, rel=1e-6)


def test_weights_may_be_said(tmp_path: Path) -> None:
    """Where the count from the config is not right, what the operator says of them counts."""
    found = size(tmp_path, tp=2, weights="4GiB")
    assert found["weight_bytes"] == 4 * GIB
    assert found["rank_weight_bytes"] == pytest.approx(2 * GIB, rel=0.01)


def test_waste_by_block_size_of_known_lengths() -> None:
    """A length of 17 leaves 15 of 32 slots empty in blocks of 16; one of 32 none; what is longer is left out."""
    lengths = LengthDistribution.of([17, 32, 32, 1000, 0], 512, "three")
    assert (lengths.number, lengths.left_out, lengths.longest, lengths.mean) == (3, 1, 32, 27)
    assert lengths.waste(16) == pytest.approx(15 / 96)
    assert lengths.waste(8) == pytest.approx(7 / 88)
    assert lengths.fit_paged(60, 16) == 30
    assert lengths.fit_reserved(60, 16, 512) == 1


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.sampled_from([8, 16, 32, 64, 128]))
def test_waste_is_less_than_a_block_a_sequence(lengths: list[int], block_size: int) -> None:
    """Whatever the lengths, no sequence wastes a whole block, and paging never holds fewer than reserving."""
    counted = LengthDistribution.of(lengths, 5000, "any")
    wasted = counted.waste(block_size) * counted.mean_blocks(block_size) * block_size
    assert 0 <= wasted <= block_size - 1 + 1e-6
    assert counted.fit_paged(10_000, block_size) >= counted.fit_reserved(10_000, block_size, 5000 + block_size)


def test_even_lengths_waste_half_a_block_on_average() -> None:
    """Also where the lengths are too many to count all."""
    for longest in (8192, 3_000_000):
        spread = LengthDistribution.evenly_spread(longest)
        for block_size in (16, 128):
            wasted = spread.waste(block_size) * spread.mean_blocks(block_size) * block_size
            assert wasted == pytest.approx((block_size - 1) / 2, rel=0.02)


def test_a_trace_without_a_length_in_range_is_refused() -> None:
    """The message names the trace and what to raise."""
    with pytest.raises(InvalidConfig, match="t.csv holds no sequence of 1 to 10 tokens; raise --context"):
        LengthDistribution.of([11, 12], 10, "t.csv")


def test_older_names_of_fields(tmp_path: Path) -> None:
    """falcon's and gpt2's configs say the same in other words."""
    falcon = dict(model_type="falcon", num_hidden_layers=2, num_attention_heads=71, hidden_size=4544, multi_query=True)
    assert ModelShape.of(ModelConfig("f", falcon)).layers == (LayerSpec(71, 1, 64),) * 2
    newer = falcon | dict(new_decoder_architecture=True, num_attention_heads=128, hidden_size=8192, num_kv_heads=8)
    assert ModelShape.of(ModelConfig("f", newer)).layers == (LayerSpec(128, 8, 64),) * 2
    gpt2 = dict(model_type="gpt2", n_layer=12, n_head=12, n_embd=768, n_ctx=1024)
    shape = ModelShape.of(ModelConfig("g", gpt2))
    assert (shape.layers, shape.max_model_len) == ((LayerSpec(12, 12, 64),) * 12, 1024)


def test_a_models_text_part_is_what_counts(tmp_path: Path) -> None:
    """Of a model that also sees, the text part's fields are read, and a note says so."""
    found = size(tmp_path, dict(model_type="gemma3", text_config=LLAMA | dict(model_type="gemma3_text", head_dim=128)))
    assert found["bytes_per_token"] == 131_072
    assert any("only the text part is counted" in note for note in found["notes"])


def test_whole_experts_on_a_rank(tmp_path: Path) -> None:
    """With --expert-parallel a rank holds its share of the experts whole: as many bytes as a part of each. Their
    number must divide, where without it their size must, and a model without experts is refused."""
    with pytest.raises(InvalidConfig, match="inner size"):
        size(tmp_path, DEEPSEEK, config=dict(moe_intermediate_size=2048 + 8), tp=16)
    found = size(tmp_path, DEEPSEEK, expert_parallel=True, config=dict(n_shared_experts=0), tp=16)
    assert (
        found["rank_weight_bytes"]
        == size(tmp_path, DEEPSEEK, config=dict(n_shared_experts=0), tp=16)["rank_weight_bytes"]
    )
    with pytest.raises(InvalidConfig, match="the experts, as --expert-parallel needs"):
        size(tmp_path, DEEPSEEK, expert_parallel=True, config=dict(n_routed_experts=250), tp=16)
    with pytest.raises(InvalidConfig, match="has no experts; leave --expert-parallel out"):
        size(tmp_path, expert_parallel=True)
