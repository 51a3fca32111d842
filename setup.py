"""Builds the C kernels of kernels/csrc into one plain shared library beside the Python files.

Everything else about the package is in pyproject.toml. The library needs neither Python's nor torch's headers (it is
loaded with ctypes), and is optional: without a compiler the install goes on, and the torch references serve.
"""

from setuptools import Extension, setup

SOURCES = [
    "attention_avx512",
    "attention_plain",
    "cpu",
    "decoder_layers",
    "linear",
    "rows",
    "sampling",
    "shared_memory",
    "transfer_blocks",
]
HEADERS = ["attention", "kv_cache", "rows", "scalar", "widen_avx512"]

setup(
    script_name="setup.py",  # so that this file, which lies in the root of the package, is no module of it
    ext_modules=[
        Extension(
            "coatcheck.kernels._native",
            sources=[f"kernels/csrc/{name}.c" for name in SOURCES],
            depends=[f"kernels/csrc/{name}.h" for name in HEADERS],
            # No -ffast-math: it may drop the infinities that masks are made of.
            extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
)
