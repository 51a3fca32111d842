"""The C library of kernels/csrc, loaded once.

The library is built at install and is optional. The launchers use the torch references if it is missing, was built from
another version of the sources, or needs instructions that the processor lacks. `native_status()` says which form runs.

torch must be imported before the library is loaded. torch brings its own libgomp, and the loader then resolves ours to
that copy; two OpenMP pools would compete for the same cores. The library uses torch's thread count, which is a setting
of each thread: a thread that calls kernels must have called `torch.set_num_threads` or `get_num_threads` once.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from coatcheck.kernels.gpu_properties import TRITON_DEVICES

VERSION = 9

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# One letter for each argument (p: pointer, q: int64), and after the colon the result (r: int, v: void).
_SIGNATURES = {
    "attention_plain": "p:r",
    "rms_norm": "p:v",
    "rotary": "p:v",
    "silu_mul": "pqpqqqq:v",
    "copy_blocks": "pqppqq:v",
    "transfer_blocks": "pqppqpqqp:v",
    "sample": "pqqqpppppppp:r",
    "noise_bits": "pppqpqp:v",
    "penalties": "pqqqpqppppp:r",
    "logprobs": "pqqqpqpppp:v",
    "shared_all_reduce": "ppqq:r",
    "shared_all_gather": "ppqp:r",
    "shared_broadcast": "ppq:r",
    "token_mask": "pqqpqpq:v",
}
_AVX512_SIGNATURES = {
    "attention_bf16_avx512": "p:r",
    "linear_bf16": "pqqppqqpqp:v",
    "linear_f32": "pqqppqqpqp:v",
    "attention_sublayer": "pppp:r",
    "fused_layers": "ppqpp:r",
    "mlp_sublayer": "pp:v",
    "pack_bf16": "pqqp:v",
    "pack_f32": "pqqp:v",
}

# The C structs, with the fields of the headers.
ATTENTION = struct.Struct("@PqPPqPPqqffqqPP")
KV_CACHE = struct.Struct("@PPqqPPqqqqqqq")
NORM = struct.Struct("@5P7qffqq")
ROTARY = struct.Struct("@8P11q")

# The dtypes that the C library computes, as its `type`. On CPU float16 takes the references.
TYPES = {torch.bfloat16: 0, torch.float32: 1}
# The dtypes of a KV pool's elements. uint8: two int4 in a byte.
ELEMENTS = {**TYPES, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4, torch.uint8: 5}


class Library:
    """The loaded library. Every C function of `_SIGNATURES` is an attribute.

    `attention`: the function of paged attention for each dtype of the queries.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        if self._dll.native_version() != VERSION:
            raise OSError(f"{path.name} was built from other sources (version {self._dll.native_version()})")
        self.avx512_bf16 = bool(self._dll.has_avx512_bf16())
        for name, signature in {**_SIGNATURES, **(_AVX512_SIGNATURES if self.avx512_bf16 else {})}.items():
            function = self._dll[name]
            arguments, result = signature.split(":")
            function.argtypes = [_POINTER if letter == "p" else _INT for letter in arguments]
            function.restype = ctypes.c_int if result == "r" else None
            setattr(self, name, function)
        self.attention = {
            torch.float32: self.attention_plain,
            torch.bfloat16: self.attention_bf16_avx512 if self.avx512_bf16 else self.attention_plain,
        }

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        """Called for functions that need a newer processor, and for no others."""
        raise AttributeError(f"{self.path.name} has no {name} for this processor")


@cache
def _load() -> tuple[Library | None, str]:
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_native{suffix}"
        if not path.exists():
            continue
        try:
            loaded = Library(path)
        except (OSError, AttributeError) as error:
            return None, f"torch reference (native library refused: {error})"
        return loaded, f"native ({'AVX512-BF16' if loaded.avx512_bf16 else 'portable'})"
    return None, "torch reference (native library not built)"


def library() -> Library | None:
    return _load()[0]


def library_for(x: Tensor) -> Library | None:
    """The library if it computes on `x`: a CPU tensor in one of TYPES, outside Triton's interpreter."""
    is_native = x.device.type == "cpu" and x.dtype in TYPES and "cpu" not in TRITON_DEVICES
    return _load()[0] if is_native else None


def native_status() -> str:
    """Which form of the CPU kernels this process runs, for logs and status pages."""
    return _load()[1]


def out_of_memory(operation: str) -> MemoryError:
    return MemoryError(f"{operation}: no memory for its working rows")
