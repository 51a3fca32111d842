"""Every causal architecture of transformers in many variants has transformers' results, or is refused with a reason."""

from collections import Counter
from pathlib import Path

import pytest

from tests.workers.architecture_sweep import MODEL_TYPES, Verdict, configs_of, documented_model_types, verdict_on

# One variant for each peculiarity of a family that tests/workers/model/test_other_architectures.py does not have.
_SAMPLE = {
    "afmoe/plain": "equal",
    "bart/plain": "refused",  # its learned positions ignore position_ids
    "cohere2/windows-mixed": "equal",
    "glm_moe_dsa/plain": "equal",  # sparse attention at a context at which it is full attention
    "granite_swa/windows-mixed": "equal",
    "llama4_text/plain": "equal",  # chunked attention with a chunk as long as the context is full attention
    "modernbert-decoder/plain": "equal",
}


def verdicts(model_type: str, directory: Path, only: set[str] | None = None) -> list[Verdict]:
    chosen = [(name, config) for name, config in configs_of(model_type) if only is None or name in only]
    return [verdict_on(name, config, directory / str(index)) for index, (name, config) in enumerate(chosen)]


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_sample_is_equal_or_refused(name: str, tmp_path: Path) -> None:
    """A chunked prompt beside another sequence has transformers' logits and greedy tokens, or the model is refused."""
    (verdict,) = verdicts(name.partition("/")[0], tmp_path, {name})
    assert verdict.outcome == _SAMPLE[name], verdict.detail


def test_the_sample_is_documented() -> None:
    """docs/models.md names the served types of the sample above."""
    equal = {name.partition("/")[0] for name, outcome in _SAMPLE.items() if outcome == "equal"}
    assert equal <= set().union(*documented_model_types())


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_architecture_is_served_wrong(model_type: str, tmp_path: Path) -> None:
    """Every variant of a family has transformers' logits, or is refused with a reason.

    The list in docs/models.md has a type if and only if its plain variant is served.
    """
    found = verdicts(model_type, tmp_path)
    faults = [verdict for verdict in found if verdict.outcome in ("wrong", "crashed")]
    print(model_type, dict(Counter(verdict.outcome for verdict in found)))
    assert not faults, faults
    is_served = any(verdict.outcome == "equal" for verdict in found if verdict.name.endswith("/plain"))
    assert is_served == (model_type in set().union(*documented_model_types())), found
