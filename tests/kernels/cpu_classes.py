"""The instruction classes that the tests of a C kernel run with."""

import pytest

from coatcheck.kernels import native


def each_class(*kernels: str) -> pytest.MarkDecorator:
    """Runs tests that use the fixture cpu_class with each class of this processor that has one of these C functions."""
    library = native.library()
    # Without the library these tests run once, and fail.
    names = ["generic"] if library is None else [name for name in library.available if library.has_own(name, *kernels)]
    return pytest.mark.parametrize("cpu_class", names, indirect=True, scope="module")
