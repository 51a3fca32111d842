"""PlanSettings: what an operator may say to `coatcheck plan`, in the words of `coatcheck serve`.

Frozen, checked here.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coatcheck.cluster.config.serve_config import FREE_SHARE, explain
from coatcheck.cluster.config.setting_values import parse_dtype, parse_kv_dtype, parse_memory
from coatcheck.proto.errors import InvalidConfig


def parse_bytes(value: object) -> float:
    """Bytes from '80GiB'; no share of anything."""
    return _above_one(value, "write bytes, such as 80GiB")


def parse_bandwidth(value: object) -> float:
    """Bytes a second from '3.35TB/s' or '900GB'."""
    written = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return _above_one(written, "write bytes a second, such as 3.35TB/s")


def _above_one(written: object, hint: str) -> float:
    try:
        number = parse_memory(written)
    except ValueError:
        number = None
    if not isinstance(number, int | float) or not 1 < number < 2**60:
        raise ValueError(hint)
    return float(number)


class PlanSettings(BaseModel):
    """`context` None: the model's own length, 8,192 at most. Memory and bandwidth are one GPU's.

    `latent` False: a model with latent attention stores every head's keys and values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1)
    tp: int = Field(1, ge=1, le=1024)
    gpu_memory: Annotated[float, BeforeValidator(parse_bytes)] = 80 * 2.0**30
    kv_memory: Annotated[float, BeforeValidator(parse_memory), Field(gt=0, lt=2**60)] = FREE_SHARE["cuda"]
    weights: Annotated[float | None, BeforeValidator(parse_bytes)] = None
    context: int | None = Field(None, ge=1, lt=2**31)
    concurrency: int = Field(16, ge=1, le=2**20)
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(parse_dtype)] = "auto"
    kv_dtype: Annotated[str, BeforeValidator(parse_kv_dtype)] = "auto"
    block_size: Literal[8, 16, 32, 64, 128] = 16
    bandwidth: Annotated[float, BeforeValidator(parse_bandwidth)] = 3.35e12
    lengths: Path | None = None
    latent: bool = True

    @classmethod
    def build(cls, flags: dict[str, Any]) -> Self:
        """From flags (None: not given); raises InvalidConfig that names the setting."""
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            raise InvalidConfig("; ".join(explain(item) for item in error.errors())) from None
