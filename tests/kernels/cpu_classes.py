"""Which instruction classes the tests of a C kernel run with: those of this processor that have a kernel of their own."""

import pytest

from coatcheck.kernels import native


def each_class(*kernels: str) -> pytest.MarkDecorator:
    """Runs a module's tests, which must use the fixture cpu_class, with each class that has one of these C functions."""
    library = native.library()
    # Without the library these tests run once, and fail.
    names = ["generic"] if library is None else [name for name in library.available if library.has_own(name, *kernels)]
    return pytest.mark.parametrize("cpu_class", names, indirect=True, scope="module")
