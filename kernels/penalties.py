"""Repetition, presence and frequency penalties on logits, in place.

    if token in prompt or output:  logit = logit / repetition  where logit > 0,  logit * repetition  otherwise
    logit -= frequency * (times in output) + presence * (in output ? 1 : 0)

Shapes: logits float32 [R, V]; token_ids int32 [R, L], each row's prompt then output then padding; prompt_lens,
total_lens int32 [R], with 0 <= prompt_lens <= total_lens <= L; repetition, presence, frequency float32 [R] (1, 0 and 0
are off). Repetition counts prompt and output, as transformers and vLLM do; the other two count the output only. One
program treats one row. The file does not know requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .launch_check import want_contiguous, want_device, want_dtype, want_rows, want_shape


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Returns `logits`, changed in place."""
    want_shape("logits", logits, (None, None))
    want_dtype("logits", logits, torch.float32)
    want_rows("logits", logits)
    rows = logits.shape[0]
    want_shape("token_ids", token_ids, (rows, None))
    want_dtype("token_ids", token_ids, torch.int32)
    want_rows("token_ids", token_ids)
    want_device("token_ids", token_ids, logits.device)
    for name, tensor, dtype in (
        ("prompt_lens", prompt_lens, torch.int32),
        ("total_lens", total_lens, torch.int32),
        ("repetition", repetition, torch.float32),
        ("presence", presence, torch.float32),
        ("frequency", frequency, torch.float32),
    ):
        want_shape(name, tensor, (rows,))
        want_dtype(name, tensor, dtype)
        want_contiguous(name, tensor)
        want_device(name, tensor, logits.device)
    library = native.library()
    if library is None or logits.device.type != "cpu":
        return apply_penalties_reference(
            logits, token_ids, prompt_lens, total_lens, repetition, presence, frequency
        )  # fmt: skip
    if library.penalties(
        logits.data_ptr(), logits.stride(0), rows, logits.shape[1], token_ids.data_ptr(), token_ids.stride(0),
        prompt_lens.data_ptr(), total_lens.data_ptr(), repetition.data_ptr(), presence.data_ptr(), frequency.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("apply_penalties")
    return logits


def apply_penalties_reference(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    at = torch.arange(token_ids.shape[1], device=logits.device)[None]
    seen = at < total_lens[:, None]
    generated = seen & (at >= prompt_lens[:, None])
    # Padding is pointed at token 0 with weight 0: it may hold anything, ids outside the vocabulary included.
    index = token_ids.masked_fill(~seen, 0).long()
    appears = torch.zeros_like(logits).scatter_add_(1, index, seen.float()) > 0
    count = torch.zeros_like(logits).scatter_add_(1, index, generated.float())
    factor = repetition[:, None].expand_as(logits)
    logits.copy_(torch.where(appears, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= frequency[:, None] * count
    logits -= presence[:, None] * (count > 0)
    return logits
