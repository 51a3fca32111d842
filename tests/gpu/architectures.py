"""The part `architectures`: a tiny model of every served type, and of the text models of multimodal types."""

from pathlib import Path

import torch

from tests.gpu.comparison import EXACT, compare_paths
from tests.gpu.outcome import Skipped
from tests.workers.architecture_sweep import MODEL_TYPES, configs_of, documented_model_types
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.multimodal_checkpoints import TOWERS, write_multimodal

LIMIT = 150.0
_LARGE = ("phi4_multimodal",)  # no setting makes these small; they take minutes, and run with --all alone
_CONTEXT = 64
# Text models that differ from those of the causal types. Most others are a llama or a qwen2 under other names.
_TOWERS = (
    *("gemma3n", "gemma4", "gemma4-dense", "gemma4-experts", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl_moe", "kimi_k25", "aria", "glm4v_moe", "granite4_vision", "mistral3"),
)


def names(whole: bool) -> list[str]:
    """TYPE: its first variant; all variants of the sweep with `whole`. "multimodal NAME"."""
    tested, others, _ = documented_model_types()
    types = [name for name in MODEL_TYPES if name in tested | others]
    small = [name for name in types if name not in _LARGE]
    variants = [name for kind in types for name, _ in configs_of(kind)] if whole else small
    return [*variants, *(f"multimodal {name}" for name in (TOWERS if whole else _TOWERS))]


def run(name: str, device: torch.device, folder: Path) -> str:
    return compare_paths(_write(name, folder), device, EXACT, brief=True)


def _write(name: str, folder: Path) -> Path:
    """The checkpoint. Raises Skipped if the installed transformers does not build the model."""
    tower = name.partition(" ")[2]
    if tower:
        try:
            return write_multimodal(tower, folder / tower)
        except Exception as error:
            raise Skipped(f"transformers does not build it: {type(error).__name__}: {error}") from error
    model_type, _, variant = name.partition("/")
    found = (config for label, config in configs_of(model_type) if not variant or label == name)
    if (config := next(found, None)) is None:
        raise Skipped("transformers does not build it")
    if getattr(config, "index_topk", _CONTEXT) < _CONTEXT:  # index_topk is the longest context that is served
        config.index_topk = _CONTEXT
    return tiny_checkpoint(name.replace("/", "-"), folder, config=config)
