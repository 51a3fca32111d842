"""logits[rows[i], token_ids[i]] += bias[i], in place; -inf forbids a token.

Shapes: logits float32 [R, V], rows int64 [n], token_ids int64 [n], bias float32 [n]. The biases of a repeated
(row, token) pair add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels.launch_check import want_contiguous, want_device, want_dtype, want_rows, want_shape


def add_logit_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Return `logits`, changed in place."""
    want_shape("logits", logits, (None, None))
    want_dtype("logits", logits, torch.float32)
    want_rows("logits", logits)
    want_shape("rows", rows, (None,))
    for name, tensor, dtype in (("rows", rows, torch.int64), ("token_ids", token_ids, torch.int64),
                                ("bias", bias, torch.float32)):  # fmt: skip
        want_shape(name, tensor, (rows.shape[0],))
        want_dtype(name, tensor, dtype)
        want_contiguous(name, tensor)
        want_device(name, tensor, logits.device)
    return add_logit_bias_reference(logits, rows, token_ids, bias)


def add_logit_bias_reference(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    return logits.index_put_((rows, token_ids), bias, accumulate=True)
