"""What a kernel's result must be beside its reference's, and what lies where it must not write."""

import torch
from torch import Tensor

SENTINEL = 7.0


def agree(have: Tensor, want: Tensor) -> None:
    """To the rounding of their type."""
    tolerance = 2e-3 if have.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
