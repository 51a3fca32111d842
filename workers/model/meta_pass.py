"""A pass of a model on the meta device, which computes shapes and nothing else. It does not know what for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def meta_pass(model: nn.Module) -> Iterator[None]:
    """Buffers, which are computed on their device, are on meta meanwhile: of tensors elsewhere torch mixes only a CPU's
    scalars with meta's, and no GPU's."""
    kept = {module: dict(module._buffers) for module in model.modules()}
    try:
        for module, buffers in kept.items():
            module._buffers.update({name: None if b is None else b.to("meta") for name, b in buffers.items()})
        with torch.inference_mode():
            yield
    finally:
        for module, buffers in kept.items():
            module._buffers.update(buffers)
