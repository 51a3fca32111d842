"""Which form of the CPU kernels is in use: the C library of kernels/native, or the plain torch references."""

from __future__ import annotations


def native_status() -> str:
    return "torch reference (native library not built)"
