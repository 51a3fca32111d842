"""Multi-head latent attention in a model: its two forms, chunks over a cached prefix, pools of any kind, refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model import latent_attention
from coatcheck.workers.model.latent_attention import LatentDims, prefers_expanded
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.cluster.broken_models import set_fields
from tests.workers.checkpoints import VOCAB, tiny_checkpoint

PUBLISHED = LatentDims(rank=512, nope=128, rope=64, value=128)
PROMPT = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(5)).tolist()


def load(path: Path, **settings: Any) -> Model:
    return load_model(path, communicator=Communicator(), device="cpu", **{"dtype": "float32", **settings})


def logits_of(model: Model, *chunks: int, kv_dtype: str = "auto") -> torch.Tensor:
    """The logits after each chunk of PROMPT."""
    driver = PagedDriver(model, kv_dtype=kv_dtype)
    sequence = driver.add_sequence(PROMPT, 0)
    return torch.stack([driver.step([(sequence, n)])[0] for n in chunks])


@pytest.mark.parametrize(
    ("q_len", "seq_len", "wanted"),
    [(1, 1, True), (1, 2, False), (512, 512, True), (1, 100_000, False), (128, 8192, False), (256, 8192, True)],
)
def test_the_cheaper_form(q_len: int, seq_len: int, wanted: bool) -> None:
    """A whole prompt is expanded, a short chunk over a long context is not: 171 queries pay for expanding a key."""
    assert prefers_expanded(PUBLISHED, q_len, seq_len) == wanted


@pytest.mark.parametrize("arch", ["deepseek-v2", "deepseek-v3"])
def test_both_forms_give_the_same_logits(
    arch: str, checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absorbed, expanded, and expanded with one head at a time, over a cached prefix too."""
    model = load(tiny_checkpoint(arch, checkpoint_directory))
    found = []
    for form, held in ((False, 1 << 20), (True, 1 << 20), (True, 1)):
        monkeypatch.setattr(latent_attention, "prefers_expanded", lambda *_, form=form: form)
        monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", held)
        found.append(logits_of(model, 23, 30, 7))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0], found[1])  # else one form ran twice


def test_one_step_may_take_both_forms(checkpoint_directory: Path) -> None:
    """A new prompt beside a chunk over a long prefix and a decode has the logits that each has alone."""
    model = load(tiny_checkpoint("deepseek-v3", checkpoint_directory))
    driver = PagedDriver(model)
    old, decoding, new = (driver.add_sequence(PROMPT[:length], 0) for length in (len(PROMPT), 20, 9))
    driver.step([(old, 55), (decoding, 19)])
    mixed = driver.step([(old, 5), (decoding, 1), (new, 9)])
    wanted = [logits_of(model, 60)[-1], logits_of(model, 20)[-1], logits_of(model, 9)[-1]]
    torch.testing.assert_close(mixed, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_odd_sizes_take_the_references(tmp_path: Path) -> None:
    """Sizes that the C library lacks give transformers' logits too."""
    sizes: dict[str, Any] = dict(kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10)
    path = tiny_checkpoint("deepseek-v3", tmp_path, **sizes)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0, [29, 58, 59]]
    torch.testing.assert_close(logits_of(load(path), 30, 29, 1), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bf16", 0.05), ("fp8", 0.25), ("int8", 0.1), ("int4", 2.0)])
def test_quantised_latents_are_close(kv_dtype: str, tolerance: float, checkpoint_directory: Path) -> None:
    """Logits over quantised latents differ from exact ones by about the rounding of the pool."""
    model = load(tiny_checkpoint("deepseek-v2", checkpoint_directory))
    exact, rounded = logits_of(model, 40, 20), logits_of(model, 40, 20, kv_dtype=kv_dtype)
    assert 0 < (rounded - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("chunks", [(60,), (1,) * 60, (7, 30, 23)])
def test_deterministic_bits_do_not_depend_on_chunks(chunks: tuple[int, ...], tmp_path: Path) -> None:
    """With --deterministic the last logits are the same bits in any chunks, in bfloat16 over an fp8 pool."""
    path = tiny_checkpoint("deepseek-v2", tmp_path, first_k_dense_replace=9)
    model = load(path, dtype="bfloat16", deterministic=True)
    assert torch.equal(logits_of(model, *chunks, kv_dtype="fp8")[-1], logits_of(model, 50, 10, kv_dtype="fp8")[-1])


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("deepseek-v3", dict(scoring_func="softmax"), "scoring_func 'softmax'; deepseek_v3 is served with 'sigmoid'"),
        ("deepseek-v3", dict(topk_method="greedy"), "served with 'noaux_tc'"),
        ("deepseek-v3", dict(moe_layer_freq=2), "moe_layer_freq 2"),
        ("deepseek-v2", dict(norm_topk_prob=True), "norm_topk_prob True; deepseek_v2 is served with False"),
        ("deepseek-v3", dict(n_group=3), "n_group must divide the experts"),
        ("deepseek-v3", dict(n_group=8, topk_group=1), "the chosen groups must hold the experts per token"),
        # The first message is that of newer releases of transformers, the second is ours.
        ("deepseek-v2", dict(qk_rope_head_dim=7), "even rotary dimension|qk_rope_head_dim 7; it must be even"),
        ("deepseek-v2", dict(hidden_act="gelu"), "hidden_act gelu cannot be served"),
    ],
)
def test_a_config_that_transformers_computes_otherwise_is_refused(
    arch: str, changes: dict[str, Any], message: str, tmp_path: Path, checkpoint_directory: Path
) -> None:
    """The message names the field, its value and what is served; no weight is read."""
    whole = tiny_checkpoint(arch, checkpoint_directory)
    for file in whole.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    set_fields(tmp_path, changes)
    with pytest.raises(InvalidModel, match=message):
        load(tmp_path)


def test_a_checkpoint_without_the_bias_of_its_router_has_none(tmp_path: Path) -> None:
    """A.X-K1 is published without e_score_correction_bias: its experts are then chosen by their scores alone."""
    path = tiny_checkpoint("axk1", tmp_path)
    tensors = load_file(path / "model.safetensors")
    zeroed = {name: x * 0 if name.endswith("e_score_correction_bias") else x for name, x in tensors.items()}
    found = []
    for stored in (zeroed, {name: x for name, x in tensors.items() if not name.endswith("e_score_correction_bias")}):
        save_file(stored, path / "model.safetensors", {"format": "pt"})
        found.append(logits_of(load(path), 40, 20))
    assert len(stored) < len(zeroed)
    assert torch.equal(found[0], found[1])


def test_experts_of_longcat_that_return_their_input(tmp_path: Path) -> None:
    """A checkpoint with and without the weights that transformers stores for such experts gives the same logits, also
    with --deterministic."""
    path = tiny_checkpoint("longcat-flash", tmp_path)
    tensors = load_file(path / "model.safetensors")
    published = {name: x for name, x in tensors.items() if not re.search(r"experts\.(8|9|10|11)\.", name)}
    assert len(published) < len(tensors)
    found = [logits_of(load(path), 40, 20)]
    save_file(published, path / "model.safetensors", {"format": "pt"})
    found += [logits_of(load(path), 40, 20), logits_of(load(path, deterministic=True), 40, 20)]
    assert torch.equal(found[1], found[0])
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-4)


def test_weights_quantised_at_load(checkpoint_directory: Path) -> None:
    """With --quantization the projections of latents stay plain, and the logits stay close."""
    path = tiny_checkpoint("deepseek-v3", checkpoint_directory)
    exact, rounded = (logits_of(load(path, quantization=kind), 40, 20) for kind in ("auto", "int8"))
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.2


def test_deterministic_refuses_a_latent_that_the_c_library_lacks(tmp_path: Path) -> None:
    """The message has the sizes that do not fit."""
    path = tiny_checkpoint("deepseek-v2", tmp_path, kv_lora_rank=40, first_k_dense_replace=9)
    with pytest.raises(InvalidConfig, match=r"multiples of 16 \(here: 40, 16\)"):
        load(path, deterministic=True)
