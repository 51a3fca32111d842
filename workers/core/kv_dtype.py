"""KvDtype: what one element of the KV pool is, and how many bits it takes.

Floats are kept as they are. Quantised elements share one float16 scale per token and head, K's and V's apart. Pure
names and numbers, which a planner may use without torch: the bits themselves are the kernels' business.
"""

from enum import StrEnum
from typing import Final

from coatcheck.proto.errors import InvalidConfig

SCALE_BYTES: Final = 2


class KvDtype(StrEnum):
    """The value is the name that a group registers with."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"  # e4m3
    INT8 = "int8"
    INT4 = "int4"  # two elements to a byte

    @property
    def bits(self) -> int:
        """Of one element."""
        return _BITS[self]

    @property
    def is_quantised(self) -> bool:
        """Whether there are scales."""
        return self.bits < 16


_BITS: Final = {
    KvDtype.FLOAT32: 32,
    KvDtype.BFLOAT16: 16,
    KvDtype.FLOAT16: 16,
    KvDtype.FP8: 8,
    KvDtype.INT8: 8,
    KvDtype.INT4: 4,
}

# What an operator may write beside auto.
KV_DTYPES: Final = {
    "bf16": KvDtype.BFLOAT16,
    "fp16": KvDtype.FLOAT16,
    "fp8": KvDtype.FP8,
    "int8": KvDtype.INT8,
    "int4": KvDtype.INT4,
}


def choose_kv_dtype(asked: str, model_dtype: str) -> KvDtype:
    """`auto` is the model's own, a name such as bfloat16. Raises InvalidConfig for an unknown one."""
    if asked == "auto":
        return KvDtype(model_dtype)
    if asked not in KV_DTYPES:
        raise InvalidConfig(f"kv-dtype is {asked!r}; use auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[asked]
