"""round_inputs(): lets a model of transformers quantise its activations as W8A8 does, as a reference."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows_reference

_OF_LATENTS = ("q_a_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")  # these keep their activations


def round_inputs(theirs: Any, format: RowFormat) -> None:
    """Let every product of `theirs` with a weight of a layer's linears and experts round its input.

    Replaces F.linear, which the caller restores.
    """
    weights = {
        weight.untyped_storage().data_ptr()
        for name, weight in theirs.model.named_parameters()
        if name.endswith(("_proj.weight", "_proj")) and not name.endswith(_OF_LATENTS)
    }
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() in weights:
            x = quantise_rows_reference(x.flatten(0, -2), format).dequantise().view(x.shape)
        return plain(x, weight, bias)

    F.linear = linear  # type: ignore[assignment]
