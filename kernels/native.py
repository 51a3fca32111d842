"""The C library of kernels/csrc: found, loaded once, and asked what this processor can run.

The library is built at install and is optional. Where it is missing, was built for another version of these files, or
the processor lacks what a kernel needs, the launchers take the torch references: `native_status()` says which, so that
a server can report it. No compiler ever runs here.

torch must be imported before the library is loaded: it brings its own libgomp, and the loader then resolves ours to
that copy by its name. Two OpenMP pools on the same cores would spin against each other. Thread counts are torch's: a
thread that calls kernels should have called `torch.set_num_threads` (or get) once, as torch's own settings are per
thread. The file does not know the operations' shapes.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

VERSION = 5

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# One letter per argument: p a pointer, q an int64, and the result r (an int) or v (void) after the colon.
_SIGNATURES = {
    "attention_bf16_avx512": "p:r",
    "attention_plain": "p:r",
    "rms_norm": "p:v",
    "rotary": "p:v",
    "silu_mul": "pqpqqqq:v",
    "copy_blocks": "pqppqpqq:v",
    "move_blocks": "pqppqpqqp:v",
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
    "linear_bf16": "pqqppqqpqp:v",
    "linear_f32": "pqqppqqpqp:v",
    "attention_half": "pppp:r",
    "layer_run": "ppqpp:r",
    "mlp_half": "pp:v",
    "pack_bf16": "pqqp:v",
    "pack_f32": "pqqp:v",
}

# The C structs, field by field as the headers declare them.
ATTENTION = struct.Struct("@PqPPqPPqqffqqPP")
POOL = struct.Struct("@PPqqPPqqqqqqq")
NORM = struct.Struct("@5P7qffqq")
ROTARY = struct.Struct("@9P12q")

# The C side's `type`: what it computes natively. float16 is left to the references on CPU.
TYPES = {torch.bfloat16: 0, torch.float32: 1}
# What a pool's elements may be; uint8 stands for two int4 in a byte.
ELEMENTS = {**TYPES, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4, torch.uint8: 5}


class Library:
    """The loaded library; every C function of `_SIGNATURES` is an attribute."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        if self._dll.native_version() != VERSION:
            raise OSError(f"{path.name} was built from other sources (version {self._dll.native_version()})")
        self.avx512_bf16 = bool(self._dll.has_avx512_bf16())
        for name, signature in {**_SIGNATURES, **(_AVX512_SIGNATURES if self.avx512_bf16 else {})}.items():
            if name == "attention_bf16_avx512" and not self.avx512_bf16:
                continue
            function = self._dll[name]
            arguments, result = signature.split(":")
            function.argtypes = [_POINTER if letter == "p" else _INT for letter in arguments]
            function.restype = ctypes.c_int if result == "r" else None
            setattr(self, name, function)
        self.attention = {
            torch.float32: self._dll.attention_plain,
            torch.bfloat16: self._dll.attention_bf16_avx512 if self.avx512_bf16 else self._dll.attention_plain,
        }

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # only for names that this processor lacks
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


def native_status() -> str:
    """Which form of the CPU kernels this process runs, in a few words for a log line or a status page."""
    return _load()[1]


def out_of_memory(operation: str) -> MemoryError:
    return MemoryError(f"{operation}: no memory for its working rows")
