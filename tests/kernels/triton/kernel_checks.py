"""The checks of the Triton kernels against their references, in groups.

test_triton_interpreted.py runs this file with TRITON_INTERPRET=1: each kernel's launcher gets CPU tensors. On a GPU
tests/gpu runs the groups with CUDA tensors, by torch's default device.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from tests.kernels.linear_attention.delta_net_checks import delta_nets
from tests.kernels.linear_attention.state_space_checks import mamba2, short_convolutions
from tests.kernels.lora.lora_checks import lora
from tests.kernels.triton.attention_checks import attention, batch_invariant, long, matrix, quantised
from tests.kernels.triton.expert_checks import products, quantised_experts, routes
from tests.kernels.triton.latent_checks import latents
from tests.kernels.triton.linear_checks import (
    fixed_order,
    packed_in_fixed_order,
    quantised_activations,
    quantised_linears,
)
from tests.kernels.triton.mended_bfloat16 import mend
from tests.kernels.triton.mended_interpreter import mend_minima, mend_products, reduce_work
from tests.kernels.triton.rank_checks import ranks
from tests.kernels.triton.row_checks import elements, empty, rows, stores, sums
from tests.kernels.triton.sampling_checks import filters, penalties, probabilities, sampling

_BFLOAT16 = (torch.bfloat16,)
# The groups in bfloat16, over pools of bfloat16 and quantised ones.
BFLOAT16: dict[str, Callable[[], None]] = {
    "attention": partial(attention, torch.bfloat16),
    "matrix": partial(matrix, pools=_BFLOAT16),
    "order": partial(batch_invariant, _BFLOAT16, torch.bfloat16),
    "quantised": partial(quantised, torch.bfloat16, torch.bfloat16),
    "stores": partial(stores, _BFLOAT16),
    "rows": partial(rows, _BFLOAT16),
    "products": partial(products, _BFLOAT16),
    "linears": partial(quantised_linears, _BFLOAT16),
    "fixed": partial(fixed_order, _BFLOAT16),
    "LoRA": partial(lora, _BFLOAT16),
    "W8A8": partial(quantised_activations, _BFLOAT16),
    "W8A8 experts": partial(quantised_experts, _BFLOAT16),
    "latents": partial(latents, _BFLOAT16),
    "delta nets": partial(delta_nets, _BFLOAT16),
    "Mamba-2": partial(mamba2, _BFLOAT16),
    "short convolutions": partial(short_convolutions, _BFLOAT16),
}


def bfloat16() -> None:
    """All groups in bfloat16, with the interpreter mended."""
    mend()
    for check in BFLOAT16.values():
        check()


GROUPS: dict[str, Callable[[], None]] = {
    "attention": partial(attention, torch.float32, torch.float16),
    "matrix": matrix,
    "whole matrix": partial(matrix, whole=True),
    "long": long,
    "order": batch_invariant,
    "elements": elements,
    "quantised": quantised,
    "stores": stores,
    "rows": rows,
    "empty": empty,
    "sums": sums,
    "ranks": ranks,
    "routes": routes,
    "products": products,
    "W8A8 experts": quantised_experts,
    "linears": quantised_linears,
    "fixed": fixed_order,
    "LoRA": lora,
    "packed": packed_in_fixed_order,
    "W8A8": quantised_activations,
    "latents": latents,
    "delta nets": delta_nets,
    "Mamba-2": mamba2,
    "short convolutions": short_convolutions,
    "sampling": sampling,
    "filters": filters,
    "probabilities": probabilities,
    "penalties": penalties,
    "bfloat16": bfloat16,
}

if __name__ == "__main__":
    mend_products()
    mend_minima()
    reduce_work()
    for name in sys.argv[1:]:
        GROUPS[name]()
    print("agreed")
