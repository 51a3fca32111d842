"""CPU tensors that weights are packed for as if they were on a GPU; no kernel can be launched."""

from collections.abc import Iterator
from contextlib import contextmanager

from coatcheck.kernels.gpu_properties import TRITON_DEVICES


@contextmanager
def cpu_as_gpu() -> Iterator[None]:
    TRITON_DEVICES.add("cpu")
    try:
        yield
    finally:
        TRITON_DEVICES.remove("cpu")
