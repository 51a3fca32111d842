"""Draws one token per row from a part of the vocabulary, for logits that ranks hold in parts (vocabulary-parallel).

    best = max over the kept tokens of a part of l + gumbel(seed, choice, position, token)

In a row a token's noise depends on its id alone. So the token with the largest `best` of all parts (of equal ones that
of the first part) is the token that `sample` draws from the whole row. A token is kept if l = logits / temperature is
at least the row's floor. Without filters the floor is -inf. For top-k, min-p, and top-p after top-k it is `find_floors`
of the k largest logits of each part. top-p alone has no such floor: it needs the mass of all parts.

Shapes: as in sample.py; floors float32 [R].
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_logits
from coatcheck.kernels.sampling.filter_floor import filter_floor
from coatcheck.kernels.sampling.sample import filter_reference, gumbel_reference, launch_draw, noise_bits_reference


def find_floors(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [R]: the filters keep the tokens whose logits / temperature is at least this floor; -inf without filters.

    Raises LaunchRefused, and MemoryError if the C library finds no memory.
    """
    check_logits(logits)
    rows, count = logits.shape
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        check_dense(name, tensor, (rows,), dtype, logits.device)
    if uses_triton(logits):
        return filter_floor(logits, temperature, top_k, top_p, min_p)
    library = native.library_for(logits)
    if library is None or count == 0:
        return find_floors_reference(logits, temperature, top_k, top_p, min_p)
    floors = torch.empty(rows)
    if library.filter_floors(
        logits.data_ptr(), logits.stride(0), rows, count, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), floors.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("find_floors")
    return floors


def find_floors_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    is_drawn = temperature > 0
    scaled = logits / torch.where(is_drawn, temperature, 1.0)[:, None]
    kept = filter_reference(scaled, top_k, top_p, min_p)
    floors = torch.where(kept > -torch.inf, kept, torch.inf).amin(dim=-1)
    # With min-p alone a part may send fewer tokens than are kept, so the floor is not the smallest kept one of
    # `logits`.
    of_min_p = scaled.amax(dim=-1) + torch.log(min_p)
    floors = torch.where((top_k > 0) | (top_p < 1), floors, of_min_p)
    return torch.where(is_drawn, floors, -torch.inf)


def draw_part(
    logits: Tensor,
    first_token: int,
    *,
    temperature: Tensor,
    floors: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """(best float32 [R], token id int64 [R]) of logits [R, width], the part from token id `first_token` on.

    `best` is l + noise, or the logit in rows with temperature 0; it is -inf if the floor keeps no token of the part.
    Raises LaunchRefused, and MemoryError if the C library finds no memory.
    """
    check_logits(logits)
    rows, width = logits.shape
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("floors", floors, torch.float32),
        ("seed", seed, torch.int64),
        ("choice", choice, torch.int32),
        ("position", position, torch.int64),
    ):
        check_dense(name, tensor, (rows,), dtype, logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if uses_triton(logits):
        launch_draw(logits, temperature, floors, seed, choice, position, tokens, best_out=best, first_token=first_token)
        return best, tokens
    library = native.library_for(logits)
    if library is None:
        return draw_part_reference(logits, first_token, temperature, floors, seed, choice, position)
    if library.draw_part(
        logits.data_ptr(), logits.stride(0), rows, width, temperature.data_ptr(), floors.data_ptr(), seed.data_ptr(),
        choice.data_ptr(), position.data_ptr(), first_token, best.data_ptr(), tokens.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("draw_part")
    return best, tokens.add_(first_token)


def draw_part_reference(
    logits: Tensor,
    first_token: int,
    temperature: Tensor,
    floors: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    is_drawn = temperature > 0
    scaled = logits / torch.where(is_drawn, temperature, 1.0)[:, None]
    token_ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    noisy = scaled + gumbel_reference(noise_bits_reference(seed, choice, position, token_ids))
    noisy = noisy.masked_fill(scaled < floors[:, None], -torch.inf)
    best, index = torch.where(is_drawn[:, None], noisy, logits).max(dim=-1)
    return best, index + first_token
