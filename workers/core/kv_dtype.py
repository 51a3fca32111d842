"""KvDtype: the element types of the KV pool.

Quantised types have one float16 scale per token and head, separately for K and V. Imports no torch, because the
planner uses it.
"""

from enum import StrEnum
from typing import Final

from coatcheck.proto.errors import InvalidConfig

SCALE_BYTES: Final = 2


class KvDtype(StrEnum):
    """The values are the names with which groups register."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"  # e4m3
    INT8 = "int8"
    INT4 = "int4"  # two elements in a byte

    @property
    def bits(self) -> int:
        """Bits of one element, without scales."""
        return _BITS[self]

    @property
    def is_quantised(self) -> bool:
        return self.bits < 16


_BITS: Final = {
    KvDtype.FLOAT32: 32,
    KvDtype.BFLOAT16: 16,
    KvDtype.FLOAT16: 16,
    KvDtype.FP8: 8,
    KvDtype.INT8: 8,
    KvDtype.INT4: 4,
}

# The values of the setting `kv-dtype`, besides auto.
KV_DTYPES: Final = {
    "bf16": KvDtype.BFLOAT16,
    "fp16": KvDtype.FLOAT16,
    "fp8": KvDtype.FP8,
    "int8": KvDtype.INT8,
    "int4": KvDtype.INT4,
}


def choose_kv_dtype(setting: str, model_dtype: str) -> KvDtype:
    """The type for an operator's `setting`; `auto` stands for `model_dtype`, for example bfloat16.

    Raises InvalidConfig for an unknown setting.
    """
    if setting == "auto":
        return KvDtype(model_dtype)
    if setting not in KV_DTYPES:
        raise InvalidConfig(f"kv-dtype is {setting!r}; use auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[setting]
