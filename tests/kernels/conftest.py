"""The choice of an instruction class for the C kernels, as a user makes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coatcheck.kernels import native


@pytest.fixture(scope="module")
def cpu_class(request: pytest.FixtureRequest) -> Iterator[str]:
    """The class that cpu_classes.each_class gives, in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.CPU_CLASS_VARIABLE, request.param)
        native._load.cache_clear()
        library = native.library()
        assert library is not None and library.cpu_class == request.param, "the library is built where tests run"
        yield request.param
    native._load.cache_clear()
