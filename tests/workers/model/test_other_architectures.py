"""Architectures beyond those of the parity tests: served with transformers' results, or refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.lm_head import LmHead, probe_head
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import VOCAB
from tests.workers.model.architectures import REFUSED, REFUSED_SHAPES, SERVED, shape_of, write
from tests.workers.ranks import run_ranks

PROMPT = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(path: Path, communicator: Communicator) -> torch.Tensor:
    """The logits after two chunks and after a decode."""
    driver = PagedDriver(load_model(path, communicator=communicator, dtype="float32", device="cpu"))
    sequence = driver.add_sequence(PROMPT, 1)
    return torch.stack([driver.step([(sequence, n)])[0] for n in (20, 29, 1)])


def wanted(path: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0, [19, 48, 49]]
    return logits


@pytest.mark.parametrize("model_type", SERVED)
def test_served_architecture_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """The logits of chunks and of a decode equal transformers' logits for the whole sequence."""
    path = write(model_type, tmp_path, **SERVED[model_type])
    torch.testing.assert_close(logits_of(path, Communicator()), wanted(path), rtol=1e-3, atol=1e-3)


def serve_all(communicator: Communicator, paths: dict[str, Path]) -> dict[str, list[list[float]] | str]:
    """The work of one rank: the logits of each architecture, or the reason why it is refused at this size."""
    answers: dict[str, list[list[float]] | str] = {}
    for model_type, path in paths.items():
        try:
            answers[model_type] = logits_of(path, communicator).tolist()
        except InvalidModel as refusal:
            answers[model_type] = str(refusal)
    return answers


# No plan for ranks in transformers, or tensors that are not of whole heads.
_ONE_RANK = {
    *("biogpt", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "hunyuan_v1_moe", "opt"),
    *("phi", "stablelm"),
}


@pytest.mark.full
def test_two_ranks_equal_transformers_or_refuse(tmp_path: Path) -> None:
    """With tp 2 an architecture has the same logits, or is refused with the advice to use tp 1."""
    paths = {model_type: write(model_type, tmp_path, **SERVED[model_type]) for model_type in SERVED}
    for answers in run_ranks(2, serve_all, paths):
        refused = {model_type for model_type, answer in answers.items() if isinstance(answer, str)}
        assert refused == _ONE_RANK
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
    """A head that reads another output of its base model than hidden states is refused before weights are read."""

    class GreedyHead(LlamaForCausalLM):
        def forward(self, **arguments: Any) -> Any:
            return self.lm_head(self.model(**arguments).hidden_states[-1])

    with torch.device("meta"):
        model = GreedyHead(shape_of("llama"))
    with pytest.raises(InvalidModel, match="llama cannot be served: its head needs more than hidden states"):
        probe_head(model)


class ScaledInPlace(LlamaForCausalLM):
    """Changes the logits where they lie."""

    def forward(self, **arguments: Any) -> Any:
        output = super().forward(**arguments)
        output.logits.mul_(0.5)
        return output


class ScaledBefore(LlamaForCausalLM):
    """Changes the hidden states where they lie."""

    def forward(self, *, inputs_embeds: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(inputs_embeds=inputs_embeds.mul_(0.5), **arguments)


@pytest.mark.parametrize(
    ("kind", "is_alone"), [(LlamaForCausalLM, True), (ScaledInPlace, False), (ScaledBefore, False)]
)
def test_a_linear_runs_alone_only_if_the_models_code_does_nothing_else(
    kind: type[PreTrainedModel], is_alone: bool
) -> None:
    """Logits are those of the whole code. That code runs again unless it passes hidden states and logits through."""
    torch.manual_seed(0)
    model: Any = kind(shape_of("llama")).eval()
    head, hidden = LmHead(model), torch.randn(3, model.config.hidden_size)
    with torch.inference_mode():
        want = model(inputs_embeds=hidden[None].clone(), use_cache=False).logits[0]
        assert torch.equal(head.logits(hidden.clone()), want)
        called: list[object] = []
        model.register_forward_hook(lambda *_: called.append(1))
        assert torch.equal(head.logits(hidden.clone()), want)
    assert len(called) == (0 if is_alone else 1)


@pytest.mark.parametrize("model_type", REFUSED)
def test_unservable_architecture_is_refused(model_type: str, tmp_path: Path) -> None:
    """A model with state outside of attention, or another kind of attention, is refused before its weights are read."""
    path = write(model_type, tmp_path, **REFUSED_SHAPES.get(model_type, {}))
    with pytest.raises(InvalidModel, match=REFUSED[model_type]):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")


def test_falcon_with_alibi_is_refused(tmp_path: Path) -> None:
    """The smallest Falcons have ALiBi instead of rotary positions."""
    path = write("falcon", tmp_path, alibi=True)
    with pytest.raises(InvalidModel, match="config.json sets alibi, which adds a bias to the scores"):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
