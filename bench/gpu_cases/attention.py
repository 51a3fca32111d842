"""Decode and prefill attention for bench/gpu.py: error, speed against the roof, and torch's own attention beside."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coatcheck.bench.gpu_cases.batch import Batch
from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.workers.core.kv_dtype import KvDtype

_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_GB = 1e9


def correct(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Odd lengths, mixed batches, and each head size, pool and option in turn, against the float32 reference."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    mixed = [(1, 1), (1, 15), (16, 16), (1, 17), (5, 257), (1, 600), (33, 40), (130, 700), (1, 1025), (1, 4097)]
    cases = [
        (bf16, KvDtype.BFLOAT16, (32, 8, 128), 0, 0.0), (bf16, KvDtype.FP8, (32, 8, 128), 0, 0.0),
        (bf16, KvDtype.INT8, (32, 8, 128), 0, 0.0), (bf16, KvDtype.INT4, (32, 8, 128), 0, 0.0),
        (fp16, KvDtype.FLOAT16, (8, 8, 64), 0, 0.0), (fp32, KvDtype.FLOAT32, (8, 2, 64), 100, 0.0),
        (bf16, KvDtype.BFLOAT16, (8, 1, 80), 0, 0.0), (bf16, KvDtype.BFLOAT16, (24, 8, 96), 0, 30.0),
        (bf16, KvDtype.BFLOAT16, (8, 4, 256), 700, 50.0), (fp32, KvDtype.INT8, (8, 2, 64), 0, 0.0),
        (bf16, KvDtype.FP8, (16, 2, 64), 0, 0.0),
    ]  # fmt: skip
    for dtype, kv, (heads, kv_heads, dim), window, softcap in cases[:2] if quick else cases:
        batch = Batch(mixed, heads, kv_heads, dim, dtype, kv, device, window=window, softcap=softcap)
        options = f", window {window}" * (window > 0) + f", cap {softcap:g}" * (softcap > 0)
        for batch_invariant in (False, True):
            error = batch.error(batch.run(batch_invariant=batch_invariant))
            order = ", batch-invariant" if batch_invariant else ""
            yield Measurement(
                "correct", f"{heads}/{kv_heads} heads of {dim}, {_name(dtype)} over {kv}{options}{order}", error=error,
                target=f"error <= {_TOLERANCE[dtype]:g}", met=error <= _TOLERANCE[dtype],
            )  # fmt: skip


def decode(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Decode steps. The share is the bandwidth of reading KV over the memory bandwidth."""
    shapes: list[tuple[str, list[tuple[int, int]], tuple[int, int, int], float]] = [
        ("64 of 4k", [(1, 4096)] * 64, (32, 8, 128), 0.85), ("16 of 16k", [(1, 16384)] * 16, (32, 8, 128), 0.85),
        ("8 of 32k", [(1, 32768)] * 8, (32, 4, 128), 0.85), ("256 of 2k", [(1, 2048)] * 256, (32, 8, 64), 0.85),
        ("one of 128k, 63 of 2k", [(1, 131072)] + [(1, 2048)] * 63, (32, 8, 128), 0.85),
        ("1 of 32k", [(1, 32768)], (32, 8, 128), 0.60), ("1 of 128k", [(1, 131072)], (32, 8, 128), 0.60),
    ]  # fmt: skip
    if quick:
        shapes = [("3 of 100", [(1, 100)] * 3, (4, 2, 64), 0.0)]
    for what, lengths, (heads, kv_heads, dim), target in shapes:
        plain = 0.0
        few = what in ("64 of 4k", "1 of 32k", "3 of 100")
        for kv in (KvDtype.BFLOAT16, KvDtype.FP8, KvDtype.INT8, KvDtype.INT4) if few else (KvDtype.BFLOAT16,):
            batch = Batch(lengths, heads, kv_heads, dim, torch.bfloat16, kv, device)
            error = batch.error(batch.run(), [0, len(lengths) - 1])
            took = seconds(batch.run, device)
            share = batch.kv_bytes / took / roofs.memory
            title = f"{what}, {heads}/{kv_heads} of {dim}, {kv}, {batch.kv_bytes / _GB:.2f} GB"
            if kv is KvDtype.BFLOAT16:
                plain = took
                theirs = _sdpa_seconds(batch, device) if len(set(lengths)) == 1 else None
                yield Measurement("decode", title, took * 1e3, share, error, "SDPA, gathered" if theirs else "",
                          theirs and theirs * 1e3, f"share >= {target:.0%}", share >= target)  # fmt: skip
            elif kv is KvDtype.INT4:
                yield Measurement("decode", title, took * 1e3, share, error, "bf16", plain * 1e3)
            else:
                yield Measurement("decode", title, took * 1e3, share, error, "bf16", plain * 1e3, "1.7 times as fast",
                          plain / took >= 1.7 or quick)  # fmt: skip
            del batch


def prefill(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Whole prompts, and chunks after a cached prefix. The share is operations per second over the matrix rate."""
    shapes = [
        ("1 of 8k", [(8192, 8192)], 128, 0.7), ("4 of 2k", [(2048, 2048)] * 4, 128, 0.0),
        ("1 of 8k", [(8192, 8192)], 64, 0.0), ("2k behind 30k", [(2048, 32768)], 128, 0.0),
    ]  # fmt: skip
    if quick:
        shapes = [("2 of 40", [(40, 40)] * 2, 64, 0.0)]
    heads, kv_heads = (4, 2) if quick else (32, 8)
    for what, lengths, dim, target in shapes:
        for kv in (KvDtype.BFLOAT16, KvDtype.FP8) if target else (KvDtype.BFLOAT16,):
            batch = Batch(lengths, heads, kv_heads, dim, torch.bfloat16, kv, device)
            error = batch.error(batch.run(), [0])
            took = seconds(batch.run, device, times=3)
            pairs = sum(q * seq_len - q * (q - 1) / 2 for q, seq_len in lengths)
            share = 4 * pairs * heads * dim / took / roofs.matrix
            name, best = _best_sdpa(batch, device)
            ratio = best / took
            meets = ratio >= target if target and kv is KvDtype.BFLOAT16 else None
            yield Measurement("prefill", f"{what}, {heads}/{kv_heads} of {dim}, {kv}", took * 1e3, share, error, name,
                      best * 1e3, f"{target:g} times as fast" if meets is not None else "", meets)  # fmt: skip
            del batch


def behind(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Few new tokens behind a long prefix, decodes beside a chunk, and one rank's heads of a 70B at tp 8. The share is
    the bandwidth of reading KV over the memory bandwidth."""
    whole, eighth = (32, 8, 128), (8, 1, 128)
    shapes = [
        (f"{count} behind {length // 1024}k", [(count, length + count)], heads)
        for heads in (whole, eighth)
        for length in (32768, 102400)
        for count in (16, 64)
    ]
    shapes += [
        ("1 of 4k", [(1, 4096)], whole), ("1 of 4k", [(1, 4096)], eighth), ("64 of 4k", [(1, 4096)] * 64, eighth),
        ("512 behind 2k, 63 decodes of 4k", [(512, 2560)] + [(1, 4096)] * 63, whole),
        ("2k behind 30k, 63 decodes of 4k", [(2048, 32768)] + [(1, 4096)] * 63, whole),
    ]  # fmt: skip
    if quick:
        shapes = [("3 behind 100, a decode of 50", [(3, 103), (1, 50)], (4, 2, 64))]
    for what, lengths, (heads, kv_heads, dim) in shapes:
        batch = Batch(lengths, heads, kv_heads, dim, torch.bfloat16, KvDtype.BFLOAT16, device)
        error = batch.error(batch.run(), [0, len(lengths) - 1])
        took = seconds(batch.run, device)
        yield Measurement(
            "behind", f"{what}, {heads}/{kv_heads} of {dim}", took * 1e3, batch.kv_bytes / took / roofs.memory, error
        )
        del batch


def flex(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """FlexAttention over dense keys and values, compiled, on the same prefill and the same decode."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
    shapes = [("prefill, 1 of 8k", [(8192, 8192)]), ("decode, 16 of 16k", [(1, 16384)] * 16)]
    if quick:
        shapes = [("prefill, 1 of 128", [(128, 128)])]
    for what, lengths in shapes:
        batch = Batch(lengths, 32, 8, 128, torch.bfloat16, KvDtype.BFLOAT16, device)
        q, k, v = batch.gathered()
        q_len, seq_len = lengths[0]
        mask = None
        if q_len > 1:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q_len, seq_len, device=str(device))
        theirs = seconds(partial(compiled, q, k, v, block_mask=mask, enable_gqa=True), device, times=3)
        ours = seconds(batch.run, device, times=3)
        yield Measurement(
            "flex", f"{what}, 32/8 of 128, bf16", ours * 1e3, beside="FlexAttention", beside_ms=theirs * 1e3
        )
        del batch


def _sdpa_seconds(batch: Batch, device: torch.device) -> float:
    q, k, v = batch.gathered()
    return seconds(partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True), device)


def _best_sdpa(batch: Batch, device: torch.device) -> tuple[str, float]:
    """The fastest of torch's backends that takes the work, over dense keys and values."""
    q, k, v = batch.gathered()
    q_len, seq_len = q.shape[2], k.shape[2]
    if q_len != seq_len:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # A causal mask that ends at the last key is not what is_causal means where there are more keys than queries.
    bias = (
        None if q_len == seq_len else torch.ones(q_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - q_len)
    )
    found: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                    SDPBackend.MATH):  # fmt: skip
        if backend is SDPBackend.MATH and found:
            break
        for grouped in (True, False):
            keys, values = (k, v) if grouped else (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            call = _sdpa(backend, q, keys, values, bias, grouped)
            try:
                call()
                found[backend.name] = seconds(call, device, times=3)
                break
            except RuntimeError:  # this backend does not take the work in this form
                continue
    name = min(found, key=lambda one: found[one])
    return f"SDPA {name.removesuffix('_ATTENTION').lower()}", found[name]


def _sdpa(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, grouped: bool
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped and k.shape[1] != q.shape[1]
            )

    return call


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
