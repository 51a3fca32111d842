"""The C library of kernels/csrc, loaded once, and the instruction class whose kernels run.

The library has kernels for every class of CLASSES that the compiler knows. The best class that the processor and its
operating system support is used, or the class that COATCHECK_CPU names. The library is built at install, and is
optional: if it is missing, or was built from another version of the sources, the torch references are used.
`native_status()` says which form runs.

torch must be imported before the library is loaded. torch brings its own libgomp, and the dynamic loader then uses that
copy for this library, too; two OpenMP thread pools would compete for the same cores. The library uses torch's number of
threads, which is a setting of each thread: a thread that calls kernels must have called `torch.set_num_threads` or
`get_num_threads` once.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from coatcheck.kernels.gpu_properties import TRITON_DEVICES

VERSION = 27
CPU_CLASS_VARIABLE = "COATCHECK_CPU"

# From the worst to the best, as in kernels/README.md. For a kernel that a class lacks, the best class before it is used
# that has the kernel and runs on this processor.
CLASSES = ("generic", "neon_bf16", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# One letter for each argument (p: pointer, q: int64), and after the colon the result (r: int, q: int64, v: void).
_CLASS_SIGNATURES = {
    "attention_bf16": "p:r",
    "attention_f32": "p:r",
    "clamped_swiglu": "p:v",
    "copy_blocks": "pqppqq:v",
    "draw_part": "pqqqpppppqpp:r",
    "filter_floors": "pqqqppppp:r",
    "gated_delta_net": "p:v",
    "latent_rotary": "p:v",
    "linear_bf16": "p:v",
    "linear_f32": "p:v",
    "linears_bf16": "pq:v",
    "linears_f32": "pq:v",
    "logprobs": "pqqqpqpppp:v",
    "lora": "p:v",
    "mamba2": "p:v",
    "noise_bits": "pppqpqp:v",
    "penalties": "pqqqpqppppp:r",
    "rms_norm": "p:v",
    "rotary": "p:v",
    "route": "p:v",
    "sample": "pqqqpppppppp:r",
    "selective_scan": "p:v",
    "shared_all_gather": "ppqp:r",
    "shared_all_reduce": "ppqq:r",
    "shared_broadcast": "ppq:r",
    "short_conv": "p:v",
    "silu_conv": "p:v",
    "silu_mul": "pqpqqqq:v",
    "token_mask": "pqqpqpq:v",
    "transfer_blocks": "pqppqpqqp:v",
    "weighted_sum": "p:v",
    "widen_logits": "pqqqp:v",
}
# Kernels that a class may lack. The kernel of another class is not used instead: it reads weights in another layout.
_OPTIONAL_SIGNATURES = {"gated_linear_bf16": "pq:v"}
_SIGNATURES = {
    "attention_sublayer": "ppppp:r",
    "experts_product": "ppp:v",
    "experts_scratch": "pq:q",
    "fused_layers": "pppqppp:r",
    "gather_rows": "p:v",
    "has_class": "p:r",
    "heads_linear": "pp:v",
    "mlp_sublayer": "ppp:v",
    "native_version": ":r",
    "pack_weight": "pqqpq:v",
    "sparse_scratch": "pq:q",
    "sparse_sublayer": "ppp:v",
}

# The C structs. The fields are those of the headers in kernels/csrc.
ATTENTION = struct.Struct("@PqPPqPPqqffqqPPqqqPqqPqP")
WEIGHT = struct.Struct("@PPqqPPPPqqqq")
LINEAR = struct.Struct("@PqqPqPP")  # follows a WEIGHT
KV_CACHE = struct.Struct("@PPqqPPqqqqqqq")
NORM = struct.Struct("@5P7qffqq")
ROTARY = struct.Struct("@8P11q")
GATED_DELTA_NET = struct.Struct("@12P13qff")
_CONVOLUTION = "6P5q"
SHORT_CONV = struct.Struct(f"@{_CONVOLUTION}2Pq")
MAMBA2 = struct.Struct(f"@{_CONVOLUTION}9P7q4f")
SELECTIVE_SCAN = struct.Struct("@12P8q")
LATENT_ROTARY = struct.Struct("@8P11qff")
LORA = struct.Struct("@7P7q")
HEADS_LINEAR = struct.Struct("@PqqPqqPqqqqqqPq")
STEP_ROWS = struct.Struct("@PqPqPqqq6P")

# {dtype in which the C library computes: its `type`}. float16 on a CPU is computed by the references.
TYPES = {torch.bfloat16: 0, torch.float32: 1}
# {dtype of a KV pool's elements: its number in C}. uint8: two int4 in a byte.
ELEMENTS = {**TYPES, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4, torch.uint8: 5}


class CpuClassRefused(ValueError):
    """COATCHECK_CPU names a class that does not exist, was not built, or cannot run on this processor."""


class Library:
    """The loaded library with the kernels of `cpu_class`, by default the best class. Every C function is an attribute.

    `is_chosen`: COATCHECK_CPU named the class. `attention`, `linear`: the C function for each dtype. `kernels`: the C
    struct Kernels of sublayers.h. Raises CpuClassRefused, and OSError for a library of another version.
    """

    def __init__(self, path: Path, cpu_class: str = "") -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        if self._dll.native_version() != VERSION:
            raise OSError(f"{path.name} was built from other sources (version {self._dll.native_version()})")
        self.available = [name for name in CLASSES if self._has(name)]
        if cpu_class and cpu_class not in self.available:
            raise CpuClassRefused(
                f"{CPU_CLASS_VARIABLE}: expected one of {', '.join(self.available)}, which this processor and this "
                f"build have, got {cpu_class!r}"
            )
        self.cpu_class, self.is_chosen = cpu_class or self.available[-1], bool(cpu_class)
        usable = self.available[self.available.index(self.cpu_class) :: -1]
        for name, signature in _SIGNATURES.items():
            setattr(self, name, _typed(self._dll[name], signature))
        for name, signature in _CLASS_SIGNATURES.items():
            built = next(one for one in usable if self.has_own(one, name))
            setattr(self, name, _typed(self._dll[f"{name}_{built}"], signature))
        for name, signature in _OPTIONAL_SIGNATURES.items():
            has_it = self.has_own(self.cpu_class, name)
            setattr(self, name, _typed(self._dll[f"{name}_{self.cpu_class}"], signature) if has_it else None)
        self.attention = {torch.bfloat16: self.attention_bf16, torch.float32: self.attention_f32}
        self.linear = {torch.bfloat16: self.linear_bf16, torch.float32: self.linear_f32}
        operations = (
            *self.linear.values(), self.linears_bf16, self.linears_f32, self.gated_linear_bf16,
            *self.attention.values(), self.rms_norm, self.rotary, self.silu_mul, self.route, self.clamped_swiglu,
            self.weighted_sum,
        )  # fmt: skip
        self.kernels = struct.pack(f"@{len(operations)}P", *(_address(function) for function in operations))

    def has_own(self, cpu_class: str, *kernels: str) -> bool:
        """Whether at least one of `kernels` was compiled for the class."""
        return any(hasattr(self._dll, f"{kernel}_{cpu_class}") for kernel in kernels)

    def _has(self, name: str) -> bool:
        """Whether the processor can run the class, and the library was built with it."""
        return bool(self._dll.has_class(name.encode())) and self.has_own(name, "linear_bf16")

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(f"{self.path.name} has no {name}")


def _address(function: ctypes._NamedFuncPointer | None) -> int:
    return 0 if function is None else ctypes.cast(function, _POINTER).value or 0


def _typed(function: ctypes._NamedFuncPointer, signature: str) -> ctypes._NamedFuncPointer:
    arguments, result = signature.split(":")
    function.argtypes = [_POINTER if letter == "p" else _INT for letter in arguments]
    function.restype = {"r": ctypes.c_int, "q": _INT, "v": None}[result]
    return function


@cache
def _load() -> tuple[Library | None, str]:
    here, wanted = Path(__file__).parent, os.environ.get(CPU_CLASS_VARIABLE, "")
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_native{suffix}"
        if not path.exists():
            continue
        try:
            loaded = Library(path, wanted)
        except (OSError, AttributeError) as error:
            return None, f"torch reference (native library refused: {error})"
        return loaded, f"native ({loaded.cpu_class})"
    return None, "torch reference (native library not built)"


def address_of(packed: bytes) -> int:
    """The address of a packed C struct. It is valid as long as `packed` is alive."""
    address = ctypes.cast(ctypes.c_char_p(packed), _POINTER).value
    assert address is not None
    return address


def library() -> Library | None:
    return _load()[0]


def library_for(x: Tensor) -> Library | None:
    """The library if it can compute on `x`: a CPU tensor of a dtype in TYPES, outside Triton's interpreter. Else
    None."""
    is_native = x.device.type == "cpu" and x.dtype in TYPES and "cpu" not in TRITON_DEVICES
    return _load()[0] if is_native else None


def native_status() -> str:
    """The form of the CPU kernels that this process runs, for logs and status pages: "native (CLASS)" or "torch
    reference (REASON)"."""
    return _load()[1]


def out_of_memory(operation: str) -> MemoryError:
    return MemoryError(f"{operation}: no memory for its working rows")
