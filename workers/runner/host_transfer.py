"""Transfer: small host values to a rank's device and back, without making the host wait where it need not.

On a GPU a plain copy waits for every kernel queued before it; pinned memory and events keep a step that is being
launched from waiting for the one before. It does not know what the values mean.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values (numbers, or nested lists of them) on the device; the copy is queued behind what runs there."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class Download:
    """A device tensor on its way to the host."""

    _host: Tensor
    _arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: Tensor) -> "Download":
        """Queues the copy; what is queued later does not delay it."""
        if tensor.device.type == "cpu":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(host, arrived)

    def wait(self) -> list[Any]:
        """The values, nested as the tensor's dimensions are, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[Any] = self._host.tolist()
        return values
