"""The comparison of a kernel's result with its reference, and the value of elements that a kernel must not write."""

import torch
from torch import Tensor

SENTINEL = 7.0


def agree(have: Tensor, want: Tensor) -> None:
    """Assert equality up to the rounding of the dtype."""
    tolerance = 2e-3 if have.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
