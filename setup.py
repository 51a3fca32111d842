"""Builds the C kernels of kernels/csrc into one plain shared library beside the Python files.

Everything else about the package is in pyproject.toml. The kernels are compiled once for each instruction class whose
flags the compiler knows; kernels/native.py picks a class when it loads the library. The library needs neither Python's
nor torch's headers (it is loaded with ctypes), and is optional: without a compiler the install goes on, and the torch
references serve.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

INCLUDE = "kernels/csrc"
# No -ffast-math: it may drop the infinities that masks are made of.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
# Where the loops of linears lie changes their time by up to a tenth, so these lie at multiples of 32 bytes.
FLAGS_OF_LINEAR = ["-falign-loops=32"]

KERNELS = [
    "attention/attention",
    "delta_net",
    "experts",
    "linear",
    "lora",
    "mamba2",
    "rows",
    "sampling",
    "selective_scan",
    "shared_memory",
    "short_conv",
    "transfer_blocks",
]
FOR_ALL_CLASSES = ["cpu", "decoder_layers", "expert_layers", "gather_rows", "heads_linear", "pack_weight", "team"]
# Of each class the kernels and the compiler's flags. A kernel that a class lacks is taken from a class before it
# (kernels/native.py). cpu.c checks that the processor has everything that the flags of a class allow.
CLASSES = {"generic": (KERNELS, [])}
if platform.machine() in ("x86_64", "AMD64"):
    # In loops of some forms GCC 14 does not fuse chains of products and sums of 256 bits by default. Then a row has
    # other bits in a tile of one row than in a tile of several.
    avx2 = ["-mavx2", "-mfma", "-mf16c", "--param=avoid-fma-max-bits=0"]
    avx512 = [*avx2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    avx512_vnni = [*avx512, "-mavx512vnni"]
    avx512_bf16 = [*avx512_vnni, "-mavx512bf16"]
    CLASSES |= {
        "avx2": (KERNELS, avx2),
        "avx2_vnni": (["linear"], [*avx2, "-mavxvnni"]),
        "avx512": (KERNELS, avx512),
        "avx512_vnni": (["linear"], avx512_vnni),
        "avx512_bf16": (["attention/attention", "linear", "rows"], avx512_bf16),
        "amx": (["attention/attention", "linear_amx"], [*avx512_bf16, "-mamx-tile", "-mamx-bf16"]),
    }
elif platform.machine() in ("aarch64", "arm64"):
    CLASSES["neon_bf16"] = (["linear", "rows"], ["-march=armv8.2-a+bf16"])


class BuildKernels(build_ext):
    """Compiles the files of all classes side by side. A class that does not compile is left out, with a warning."""

    def build_extension(self, ext: Extension) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tasks = {
                name: [pool.submit(self._compile, name, source, flags) for source in sources]
                for name, (sources, flags) in CLASSES.items()
            }
        for name, compiled in tasks.items():
            try:
                ext.extra_objects += [task.result() for task in compiled]
            except CompileError as error:
                if name == "generic":
                    raise
                self.warn(f"the C kernels are built without those for {name}: {error}")
        super().build_extension(ext)

    def _compile(self, name: str, source: str, flags: list[str]) -> str:
        folder = os.path.join(self.build_temp, name)
        os.makedirs(os.path.dirname(os.path.join(folder, "kernels", "csrc", source)), exist_ok=True)
        (compiled,) = self.compiler.compile(
            [f"kernels/csrc/{source}.c"],
            output_dir=folder,
            macros=[("CPU_CLASS", name)],
            include_dirs=[INCLUDE],
            extra_postargs=[*FLAGS, *(FLAGS_OF_LINEAR if source == "linear" else ()), *flags],
        )
        return compiled


setup(
    script_name="setup.py",  # so that this file, which lies in the root of the package, is no module of it
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "coatcheck.kernels._native",
            sources=[f"kernels/csrc/{name}.c" for name in FOR_ALL_CLASSES],
            depends=glob("kernels/csrc/**/*.[ch]", recursive=True),
            include_dirs=[INCLUDE],
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
)
