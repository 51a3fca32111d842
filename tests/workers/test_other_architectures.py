"""Architectures beyond those that we promise: served right or refused with a reason, never served wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.communicator import Communicator
from coatcheck.workers.model import load_model
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.driver import Driver

_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SERVED: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {},
    "exaone4": {},
    "gemma": {},
    "glm4": {},
    "glm4_moe": _EXPERTS | dict(n_routed_experts=4),
    "gpt_neox": {},
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "olmo3": {},
    "olmoe": _EXPERTS,
    "phi": {},
    "phimoe": dict(num_local_experts=4),
    "qwen2_moe": _EXPERTS,
    "smollm3": {},
    "starcoder2": {},
}
REFUSED = {
    "bloom": "outside of transformers' attention interface",
    "deepseek_v3": "keys and values differ in shape",
    "diffllama": "attends more than once",
    "falcon": "transformers cannot build it with our attention",
    "mamba": "cannot be served",
    "nemotron": "do not hand our arguments down",
    "opt": "its head needs more than hidden states",
    "qwen3_next": "layers 0, 1 keep their state",
}


def write(model_type: str, directory: Path, **differences: Any) -> Path:
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    limits = dict(num_key_value_heads=2, max_position_embeddings=256, vocab_size=VOCAB)
    config = CONFIG_MAPPING[model_type](
        **(shape | limits | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0) | differences)
    )
    return tiny_checkpoint(model_type, directory, config=config)


@pytest.mark.parametrize("model_type", SERVED)
def test_served_architecture_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits of chunks and of a decode equal transformers' for the whole sequence at once."""
    path = write(model_type, tmp_path, **SERVED[model_type])
    driver = Driver(load_model(path, communicator=Communicator(), dtype="float32", device="cpu"))
    tokens = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = driver.start(tokens, 1)
    logits = [driver.step([(sequence, n)])[0] for n in (20, 29, 1)]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0, [19, 48, 49]]
    torch.testing.assert_close(torch.stack(logits), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model_type", REFUSED)
def test_unservable_architecture_is_refused(model_type: str, tmp_path: Path) -> None:
    """What keeps state elsewhere, or attends in another way, is refused before its weights are read."""
    path = write(model_type, tmp_path)
    with pytest.raises(InvalidModel, match=REFUSED[model_type]):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
