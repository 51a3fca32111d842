"""Draw one token per row of logits: temperature, then min-p, then top-k, then top-p, then a Gumbel-max draw.

    l = logits / temperature
    min-p:  keep l >= max(l) + log(min_p)
    top-k:  keep l >= the k-th largest l                          (keeps all equal values)
    top-p:  keep l >= the largest v such that the mass of {l >= v} reaches top_p of the mass of the kept tokens
    token = argmax over the kept tokens of l + gumbel(seed, choice, position, token)        (the smallest id if equal)

Each filter is a threshold on the value, so the result does not depend on the order of a sort. A mass is a sum of
integers, exp(l - max(l)) in units of 2^-40, so it does not depend on the order of the addition. If values equal to the
k-th make top-k keep more than k tokens, the mass of the kept tokens counts only k of them; so it depends on the k
largest values alone. Rows with temperature 0 take the argmax.

Shapes: logits float32 [R, V]; temperature, top_p, min_p float32 [R]; top_k int32 [R] (0: off);
seed int64 [R] (the bits of a uint64), choice int32 [R], position int64 [R]; returns int64 [R].

The bits of the noise are a hash of (seed, choice, position, token id). They do not depend on the batch, the row or the
machine: the torch, C and Triton forms give the same bits. One program draws one row.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_logits
from coatcheck.kernels.sampling.filter_floor import MASS_UNITS, filter_floor

# splitmix64's increment and multipliers, as the signed integers that torch takes.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
LOW_32 = 0xFFFFFFFF


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _murmur(x):
    x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed, choice, position):
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(seed.to(tl.uint64) + golden)
    key = _mix(key ^ (choice.to(tl.int64).to(tl.uint64) + golden))
    return _mix(key ^ (position.to(tl.uint64) + golden))


@triton.jit
def _token_bits(key, token):
    bits = token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    return _murmur(_murmur(bits ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32))


@triton.jit(
    do_not_specialize=[
        "temperature", "floors", "seed", "choice", "position", "out", "bits_out", "best_out", "first_token",
    ]
)  # fmt: skip
def _draw(
    logits, temperature, floors, seed, choice, position, out, bits_out, best_out, first_token, stride, vocab,
    BITS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row, among the logits that are at least its floor.

    BITS: also store the hash, for a test. PART: the row begins at token id `first_token`; also store the largest sum of
    logit and noise.
    """
    row = tl.program_id(0).to(tl.int64)
    temp, floor = tl.load(temperature + row), tl.load(floors + row)
    key = _row_key(tl.load(seed + row), tl.load(choice + row), tl.load(position + row))
    best = tl.full([BLOCK], float("-inf"), tl.float32)  # the largest sum in each lane
    tokens = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        mask = ids < vocab
        bits = _token_bits(key, first_token + ids if PART else ids)
        if BITS:
            tl.store(bits_out + row * vocab + ids, bits.to(tl.int64), mask)
        x = tl.load(logits + row * stride + ids, mask, other=float("-inf"))
        if temp > 0:
            x = x / temp
            u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
            exponential = tl.where(u < 0.0009765625, u + 0.5 * u * u, -tl.log(1.0 - u))
            x = tl.where(x >= floor, x - tl.log(exponential), float("-inf"))
        tokens = tl.where(x > best, ids, tokens)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tokens, vocab), 0).to(tl.int64)
    if PART:
        tl.store(best_out + row, top)
        token += first_token
    tl.store(out + row, token)


def launch_draw(
    logits: Tensor, temperature: Tensor, floors: Tensor, seed: Tensor, choice: Tensor, position: Tensor, out: Tensor,
    bits_out: Tensor | None = None, *, best_out: Tensor | None = None, first_token: int = 0,
) -> None:  # fmt: skip
    """Write the drawn tokens to `out` int64 [R]. `floors`: float32 [R].

    `bits_out`: int64 [R, V] for the hashes. `best_out`: float32 [R] for the largest sums, if `logits` is the part of
    the vocabulary from token id `first_token` on (draw_part.py).
    """
    if len(logits):
        _draw[(len(logits),)](
            logits, temperature, floors, seed, choice, position, out, out if bits_out is None else bits_out,
            floors if best_out is None else best_out, first_token, logits.stride(0), logits.shape[1],
            BITS=bits_out is not None, PART=best_out is not None, BLOCK=2048, num_warps=8,
        )  # fmt: skip


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> Tensor:
    """The token ids, int64 [R]. Raises LaunchRefused, and MemoryError if the C library finds no memory."""
    check_logits(logits)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("choice", choice, torch.int32),
        ("position", position, torch.int64),
    ):
        check_dense(name, tensor, (logits.shape[0],), dtype, logits.device)
    if uses_triton(logits):
        floors = filter_floor(logits, temperature, top_k, top_p, min_p)
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        launch_draw(logits, temperature, floors, seed, choice, position, out)
        return out
    library = native.library_for(logits)
    if library is None or logits.shape[1] == 0:
        return sample_reference(logits, temperature, top_k, top_p, min_p, seed, choice, position)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    if library.sample(
        logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1], temperature.data_ptr(),
        top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), seed.data_ptr(), choice.data_ptr(), position.data_ptr(),
        out.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("sample")
    return out


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> Tensor:
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    kept = filter_reference(scaled, top_k, top_p, min_p)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noisy = kept + gumbel_reference(noise_bits_reference(seed, choice, position, token_ids))
    return torch.where(greedy, logits.argmax(dim=-1), noisy.argmax(dim=-1))


def filter_reference(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`scaled` with -inf for every logit that the filters remove."""
    vocab = scaled.shape[1]
    highest = scaled.max(dim=-1, keepdim=True).values
    # log(0) is -inf: min_p 0 keeps everything.
    kept = scaled.masked_fill(scaled < highest + torch.log(min_p)[:, None], -math.inf)
    falling = kept.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long() - 1
    floor = falling.gather(1, last[:, None])
    kept = kept.masked_fill(kept < floor, -math.inf)
    falling = falling.masked_fill(falling < floor, -math.inf)
    mass = (torch.exp(falling - highest) * MASS_UNITS).long().cumsum(dim=-1)
    goal = torch.ceil(top_p.double()[:, None] * mass.gather(1, last[:, None]).double()).clamp(min=1)
    reached = mass >= goal
    reached[:, -1] = True  # a row whose tokens are all forbidden has no mass
    floor = torch.where(top_p[:, None] < 1, falling.gather(1, reached.int().argmax(dim=-1)[:, None]), -math.inf)
    return kept.masked_fill(kept < floor, -math.inf)


def noise_bits_reference(seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [R, len(token_ids)], 32 random bits each: splitmix64 over (seed, choice, position) gives the row's key, two
    rounds of murmur's finalizer over key and token id the bits."""
    key = _mix_reference(seed + GOLDEN)
    key = _mix_reference(key ^ (choice.long() + GOLDEN))
    key = _mix_reference(key ^ (position + GOLDEN))
    low, high = (key & LOW_32)[:, None], ((key >> 32) & LOW_32)[:, None]
    bits = _murmur_reference((token_ids[None] * 0x9E3779B1 & LOW_32) ^ low)
    return _murmur_reference((bits + high) & LOW_32)


def _mix_reference(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift right of int64. torch's is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _murmur_reference(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW_32
    return x ^ (x >> 16)


def gumbel_reference(bits: Tensor) -> Tensor:
    """-log(E) with E = -log(1 - u) and u = (bits + 1/2) / 2^32, in float32.

    log(1 - u), not log(u), because small u decide whether a rare token is drawn, and float32 is finest near 0.
    """
    u = (bits.float() + 0.5) * 2.0**-32
    u = u.clamp(max=1 - 2.0**-24)
    series = u + 0.5 * u * u
    exponential = torch.where(u < 2.0**-10, series, -torch.log(1 - u))
    return -torch.log(exponential)
