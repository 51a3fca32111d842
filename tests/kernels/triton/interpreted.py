"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: each kernel's launcher on CPU tensors."""

import sys
from collections.abc import Callable
from functools import partial

import torch

from tests.kernels.layers.interpreted_delta_nets import delta_nets
from tests.kernels.triton.interpreted_attention import attention, batch_invariant, long, matrix, quantised
from tests.kernels.triton.interpreted_experts import products, quantised_experts, routes
from tests.kernels.triton.interpreted_latents import latents
from tests.kernels.triton.interpreted_linears import (
    fixed_order,
    packed_in_fixed_order,
    quantised_activations,
    quantised_linears,
)
from tests.kernels.triton.interpreted_ranks import ranks
from tests.kernels.triton.interpreted_rows import elements, empty, rows, stores, sums
from tests.kernels.triton.interpreted_sampling import filters, penalties, probabilities, sampling
from tests.kernels.triton.mended_bfloat16 import mend
from tests.kernels.triton.mended_interpreter import mend_products, reduce_work


def bfloat16() -> None:
    """The groups in bfloat16, over pools of bfloat16 and quantised ones, with the interpreter mended."""
    mend()
    attention(torch.bfloat16)
    matrix(pools=(torch.bfloat16,))
    batch_invariant((torch.bfloat16,), torch.bfloat16)
    quantised(torch.bfloat16, torch.bfloat16)
    stores((torch.bfloat16,))
    rows((torch.bfloat16,))
    products((torch.bfloat16,))
    quantised_linears((torch.bfloat16,))
    fixed_order((torch.bfloat16,))
    quantised_activations((torch.bfloat16,))
    quantised_experts((torch.bfloat16,))
    latents((torch.bfloat16,))
    delta_nets((torch.bfloat16,))


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
    "packed": packed_in_fixed_order,
    "W8A8": quantised_activations,
    "latents": latents,
    "delta nets": delta_nets,
    "sampling": sampling,
    "filters": filters,
    "probabilities": probabilities,
    "penalties": penalties,
    "bfloat16": bfloat16,
}

if __name__ == "__main__":
    mend_products()
    reduce_work()
    for name in sys.argv[1:]:
        GROUPS[name]()
    print("agreed")
