"""Small copies between host and device that do not make the host wait for the device.

On a GPU a plain copy waits for every kernel queued before it. Pinned memory and events let the next step be launched
while the previous one still runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values (numbers, or nested lists of them) as a tensor on `device`; on a GPU the copy is only queued."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: NDArray[np.int32]) -> None:
    """Write the values to the start of `target`, int32 on any device; on a GPU the copy is only queued."""
    source = torch.from_numpy(values)
    if target.device.type != "cpu":
        source = source.pin_memory()
    target[: len(source)].copy_(source, non_blocking=True)


@dataclass(slots=True)
class HostCopy:
    """A device tensor that is being copied to the host."""

    _host: Tensor
    _done: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: Tensor) -> "HostCopy":
        """Queue the copy. Work that is queued later does not delay it."""
        if tensor.device.type == "cpu":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def wait(self) -> list[Any]:
        """Block until the copy is done. Returns the values, nested as the tensor's dimensions are."""
        values: list[Any] = self._wait().tolist()
        return values

    def wait_rows(self) -> list[NDArray[np.float32]]:
        """As `wait`, for a matrix of float32: its rows, which share one buffer."""
        return list(self._wait().numpy())

    def _wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host
