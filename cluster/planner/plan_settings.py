"""PlanSettings: the settings of `coatcheck plan`. Settings shared with `coatcheck serve` have the same names."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from coatcheck.cluster.config.setting_values import (
    lora_modules_of,
    parse_dtype,
    parse_kv_dtype,
    parse_lora_modules,
    parse_memory,
)
from coatcheck.cluster.config.settings import Settings, setting
from coatcheck.workers.core.attention_selector import AttentionBackendSetting
from coatcheck.workers.core.lora_module import LoraModule

_PANEL: Final = "Options"
# `coatcheck serve` measures its largest step and leaves a tenth of the card unused. The plan cannot measure.
_POOL_SHARE: Final = 0.85


def parse_bytes(value: object) -> float:
    """Bytes from '80GiB'. Shares are refused, and numbers that lack their unit, such as 80."""
    size = _parse_above_one(value, "write bytes, such as 80GiB")
    if size < 1024:
        raise ValueError("write bytes with a unit, such as 80GiB")
    return size


def parse_bandwidth(value: object) -> float:
    """Bytes per second from '3.35TB/s' or '900GB'."""
    written = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return _parse_above_one(written, "write bytes a second, such as 3.35TB/s")


def _parse_above_one(written: object, hint: str) -> float:
    try:
        number = parse_memory(written)
    except ValueError:
        number = None
    if not isinstance(number, int | float) or not 1 < number < 2**60:
        raise ValueError(hint)
    return float(number)


class PlanSettings(Settings):
    """Memory and bandwidth are those of one GPU."""

    model: str = Field(
        min_length=1, description="A model's directory, its config.json, a GGUF file, or a Hugging Face model id."
    )
    tp: int = setting(_PANEL, "Ranks in a group, one GPU each.", 1, ge=1, le=1024)
    expert_parallel: bool = setting(_PANEL, "Each rank holds whole experts, instead of a part of each.", False)
    mla_shard: Literal["replicate", "tokens"] = setting(
        _PANEL,
        "Latent attention (MLA): every rank stores the latents of all tokens, or a part of each block's tokens.",
        "replicate",
    )
    gpu_memory: Annotated[float, BeforeValidator(parse_bytes)] = setting(
        _PANEL, "Memory of a GPU that is free when a rank starts.", 80 * 2.0**30, in_words="80GiB"
    )
    kv_memory: Annotated[float, BeforeValidator(parse_memory)] = setting(
        _PANEL,
        "KV pool of each rank: bytes, or a share of the memory that is free once the weights are loaded.",
        _POOL_SHARE,
        gt=0,
        lt=2**60,
    )
    state_snapshot_share: float = setting(
        _PANEL,
        "Share of --kv-memory for snapshots, of a model whose layers keep states. As of `coatcheck serve`.",
        0.25,
        ge=0,
        le=0.9,
    )
    weights: Annotated[float | None, BeforeValidator(parse_bytes)] = setting(
        _PANEL, "Bytes of all weights.", None, in_words="counted from config.json"
    )
    context: int | None = setting(
        _PANEL,
        "Tokens in a sequence, prompt and answer together.",
        None,
        in_words="8192, or the model's maximum if that is smaller",
        ge=1,
        lt=2**31,
    )
    concurrency: int = setting(_PANEL, "Sequences that run at once.", 16, ge=1, le=2**20)
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(parse_dtype)] = setting(
        _PANEL, "float32, bfloat16, float16, or auto: the dtype in config.json.", "auto"
    )
    device: Literal["cuda", "cpu"] = setting(
        _PANEL,
        "cuda, or cpu. Quantised weights are counted as stored, from the headers of MODEL's files.",
        "cuda",
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] = setting(_PANEL, "As of `coatcheck serve`.", "auto")
    lora_modules: Annotated[str | None, BeforeValidator(parse_lora_modules)] = setting(
        _PANEL,
        "As of `coatcheck serve`: the LoRA adapters that each rank holds beside its weights.",
        None,
        metavar="NAME=PATH...",
    )
    kv_dtype: Annotated[str, BeforeValidator(parse_kv_dtype)] = setting(
        _PANEL, "bf16, fp16, fp8, int8, int4, or auto: as --dtype.", "auto"
    )
    attention_backend: AttentionBackendSetting = setting(
        _PANEL, "As of `coatcheck serve`: refused here if it cannot serve the model or the pool.", "auto"
    )
    block_size: Literal[8, 16, 32, 64, 128] = setting(_PANEL, "Tokens in a KV block: 8, 16, 32, 64 or 128.", 16)
    bandwidth: Annotated[float, BeforeValidator(parse_bandwidth)] = setting(
        _PANEL, "Memory bandwidth of a GPU.", 3.35e12, in_words="3.35TB/s, an H100's"
    )
    lengths: Path | None = setting(
        _PANEL,
        "A trace of real sequence lengths (.csv, .jsonl, .gz).",
        None,
        in_words="evenly spread from one token to --context",
    )
    latent: bool = setting(
        _PANEL,
        "For a model with latent attention (MLA): the cache stores latents, or the keys and values of every head.",
        True,
    )

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        return lora_modules_of(self.lora_modules)
