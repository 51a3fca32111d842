"""Architectures beyond those that we promise: served right or refused with a reason, never served wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.lm_head import probe_head
from coatcheck.workers.model.model import load_model
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.driver import Driver
from tests.workers.ranks import run_ranks

_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SERVED: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "cohere": {},
    "cohere2": {},
    "exaone4": {},
    "gemma3n_text": dict(
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=8,
        activation_sparsity_pattern=None,
    ),
    "gemma": {},
    "gemma4_text": dict(
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "glm4": {},
    "glm4_moe": _EXPERTS | dict(n_routed_experts=4),
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=16,  # shorter than the prompt: sinks with and without a window
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "hunyuan_v1_moe": dict(head_dim=16, num_experts=4, moe_topk=2),
    "olmo3": {},
    "olmoe": _EXPERTS,
    "opt": dict(word_embed_proj_dim=64, ffn_dim=96),
    "phi": {},
    "phimoe": dict(num_local_experts=4, sliding_window=16),
    "qwen2_moe": _EXPERTS | dict(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "smollm3": {},
    "starcoder2": {},
}
REFUSED = {
    "bloom": "outside of transformers' attention interface",
    "deepseek_v3": "keys and values differ in shape",
    "diffllama": "attends more than once",
    "falcon_h1": "layers.0.mamba.conv1d .a convolution over 4 tokens. computes a token's result from other tokens",
    "falcon": "its attention does not go through transformers' attention interface",
    "llama4_text": "its mask is neither causal nor a sliding window",
    "mamba": "a convolution over 4 tokens",
    "nemotron": "do not hand our arguments down",
    "qwen3_next": "layers.0.linear_attn.conv1d .a convolution over 4 tokens. computes a token's result from other",
    "zaya": "qkv_proj.conv_qk_depthwise .a convolution over 2 tokens. computes a token's result from other tokens",
}

_DIFFERENCES: dict[str, dict[str, Any]] = {"zaya": dict(num_experts_per_tok=1, num_experts=4, head_dim=16)}
_DIFFERENCES["llama4_text"] = dict(attention_chunk_size=16, num_local_experts=4, head_dim=16)


def shape_of(model_type: str, **differences: Any) -> Any:
    """The config of a tiny model of that type."""
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    limits = dict(num_key_value_heads=2, max_position_embeddings=256, vocab_size=VOCAB)
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return CONFIG_MAPPING[model_type](**(shape | limits | tokens | differences))


def write(model_type: str, directory: Path, **differences: Any) -> Path:
    return tiny_checkpoint(model_type, directory, config=shape_of(model_type, **differences))


PROMPT = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(path: Path, communicator: Communicator) -> torch.Tensor:
    """After two chunks and after a decode."""
    driver = Driver(load_model(path, communicator=communicator, dtype="float32", device="cpu"))
    sequence = driver.start(PROMPT, 1)
    return torch.stack([driver.step([(sequence, n)])[0] for n in (20, 29, 1)])


def wanted(path: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0, [19, 48, 49]]
    return logits


@pytest.mark.parametrize("model_type", SERVED)
def test_served_architecture_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits of chunks and of a decode equal transformers' for the whole sequence at once."""
    path = write(model_type, tmp_path, **SERVED[model_type])
    torch.testing.assert_close(logits_of(path, Communicator()), wanted(path), rtol=1e-3, atol=1e-3)


def serve_all(communicator: Communicator, paths: dict[str, Path]) -> dict[str, list[list[float]] | str]:
    """A rank's work: each architecture's logits, or why it is refused at this size."""
    answers: dict[str, list[list[float]] | str] = {}
    for model_type, path in paths.items():
        try:
            answers[model_type] = logits_of(path, communicator).tolist()
        except InvalidModel as refusal:
            answers[model_type] = str(refusal)
    return answers


@pytest.mark.full
def test_two_ranks_equal_transformers_or_refuse(tmp_path: Path) -> None:
    """Split over two ranks an architecture gives the same logits, or says that it is to be served with tp 1."""
    paths = {model_type: write(model_type, tmp_path, **SERVED[model_type]) for model_type in SERVED}
    for answers in run_ranks(2, serve_all, paths):
        refused = {model_type for model_type, answer in answers.items() if isinstance(answer, str)}
        assert refused == {"biogpt", "gpt2", "gpt_neox", "hunyuan_v1_moe", "opt", "phi"}
        for model_type, answer in answers.items():
            if isinstance(answer, str):
                assert answer.endswith("serve it with tp 1")
            else:
                torch.testing.assert_close(torch.tensor(answer), wanted(paths[model_type]), rtol=1e-3, atol=1e-3)


def test_a_checkpoint_of_the_base_model_is_served(tmp_path: Path) -> None:
    """Published GPT-2 checkpoints name their tensors as the base model does, without a prefix."""
    path = write("gpt2", tmp_path)
    expected = wanted(path)
    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "h.0.attn.c_attn.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(path, Communicator()), expected, rtol=1e-3, atol=1e-3)


def test_a_head_that_needs_more_than_hidden_states_is_refused() -> None:
    """A head that computes with anything else that its base model returns is refused before weights are read."""

    class GreedyHead(LlamaForCausalLM):
        def forward(self, **arguments: Any) -> Any:
            return self.lm_head(self.model(**arguments).hidden_states[-1])

    with torch.device("meta"):
        model = GreedyHead(shape_of("llama"))
    with pytest.raises(InvalidModel, match="llama cannot be served: its head needs more than hidden states"):
        probe_head(model)


@pytest.mark.parametrize("model_type", REFUSED)
def test_unservable_architecture_is_refused(model_type: str, tmp_path: Path) -> None:
    """What keeps state elsewhere, or attends in another way, is refused before its weights are read."""
    path = write(model_type, tmp_path, **_DIFFERENCES.get(model_type, {}))
    with pytest.raises(InvalidModel, match=REFUSED[model_type]):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
