"""Logits in float32, and the largest logit of each row, in one thread on a CPU unless there are many.

torch divides an operation over more than 32,768 elements evenly between its threads, and waits for all of them. If one
has lost its core to another process, that takes milliseconds: 11 for the argmax of 16 × 8,192 logits on two busy cores,
where one thread took 0.05. More than MOST_IN_ONE_THREAD logits are left to torch.

Shapes: logits [R, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels import native

MOST_IN_ONE_THREAD = 1 << 22


def widen_logits(logits: Tensor) -> Tensor:
    """The logits in float32. Float32 logits are returned as they are."""
    library = native.library_for(logits)
    if library is None or logits.dtype != torch.bfloat16 or logits.stride(1) != 1 or _are_many(logits):
        return logits.float()
    rows, vocab = logits.shape
    wide = torch.empty(rows, vocab, dtype=torch.float32)
    library.widen_logits(logits.data_ptr(), logits.stride(0), rows, vocab, wide.data_ptr())
    return wide


def argmax(logits: Tensor) -> Tensor:
    """The smallest index of the largest logit of each row, int64 [R]. NaN is the largest, as in torch.

    logits: float32 [R, V]
    """
    if logits.device.type != "cpu" or _are_many(logits):
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def pick_tokens(logits: Tensor, slots: list[int], positions: list[int], token_ids: Tensor) -> Tensor:
    """As `argmax`, on a CPU. Also writes the tokens into the batch state.

    token_ids: int32 [slots, positions]; the token of row r is written to [slots[r], positions[r]]
    """
    tokens = argmax(logits)
    # torch's store, with its index tensors, took 0.18 ms of a traced step (bench/LOG.md).
    token_ids.numpy()[slots, positions] = tokens.numpy()
    return tokens


def _are_many(logits: Tensor) -> bool:
    return logits.numel() > MOST_IN_ONE_THREAD
