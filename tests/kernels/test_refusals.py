"""Every operation refuses a tensor of a wrong shape, dtype, stride or device, and names the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from coatcheck.kernels.attention.latent_attention import expanded_attention, latent_attention
from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.attention.rotary import rotary_and_store
from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.kv.store_kv import store_kv
from coatcheck.kernels.kv.transfer_blocks import sum_blocks, transfer_blocks
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.heads_linear import HeadsLinear
from coatcheck.kernels.layers.latent_rotary import rotate_and_store_latent
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul
from coatcheck.kernels.sampling.logprobs import logprobs
from coatcheck.kernels.sampling.penalties import add_logit_bias, apply_penalties
from coatcheck.kernels.sampling.sample import sample
from coatcheck.kernels.sampling.token_mask import apply_token_mask
from tests.kernels.caches import strided_cache

I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Launch:
    """An operation with arguments that it takes."""

    call: Callable[..., object]
    tensors: dict[str, Tensor]
    others: dict[str, Any] = field(default_factory=dict)


def _f(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return strided_cache(4, 2, 16, 32, dtype, fill=0)


def launches() -> dict[str, Launch]:
    parts = {"k": _f(4, 2, 16, 32), "v": _f(4, 2, 16, 32)}
    bytes_ = {name: torch.zeros(4, 2, 16, 32, dtype=torch.int8) for name in ("k", "v")}
    scales = {name: torch.zeros(4, 2, 16, dtype=torch.float16) for name in ("k_scales", "v_scales")}
    tables = {"block_tables": torch.zeros(2, 2, dtype=I32), "seq_lens": torch.tensor([1, 5], dtype=I32),
              "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=I32)}  # fmt: skip
    rotary = {"q": _f(3, 4, 32), "k": _f(3, 2, 32), "cos": _f(3, 32), "sin": _f(3, 32)}
    slots = torch.arange(3)
    latents = {"latent": _f(4, 1, 16, 32), "rope_keys": _f(4, 1, 16, 16)}
    latent_scales = {f"{name}_scales": torch.zeros(4, 1, 16, dtype=torch.float16) for name in ("latent", "rope")}
    pool = torch.zeros(6, 64, dtype=torch.uint8)
    two = torch.tensor([1, 2])
    knobs = {"temperature": torch.ones(3), "top_k": torch.zeros(3, dtype=I32), "top_p": torch.ones(3),
             "min_p": torch.zeros(3), "seed": torch.arange(3), "choice": torch.zeros(3, dtype=I32),
             "position": torch.arange(3)}  # fmt: skip
    fine = {"prompt_lens": torch.ones(3, dtype=I32), "total_lens": torch.ones(3, dtype=I32),
            "repetition": torch.ones(3), "presence": torch.zeros(3), "frequency": torch.zeros(3)}  # fmt: skip
    return {
        "KVCache": Launch(KVCache, parts),
        "KVCache, int8": Launch(KVCache, bytes_ | scales),
        "paged_attention": Launch(
            paged_attention, {"q": _f(3, 4, 32), **tables, "sinks": _f(4)},
            {"cache": _cache(), "scale": 0.2},
        ),
        "LatentCache": Launch(LatentCache, latents),
        "LatentCache, int8": Launch(
            LatentCache, {name: torch.zeros(4, 1, 16, 32, dtype=torch.int8) for name in latents} | latent_scales
        ),
        "latent_attention": Launch(
            latent_attention, {"q": _f(3, 4, 48), **tables}, {"cache": LatentCache(**latents), "scale": 0.2}
        ),
        "expanded_attention": Launch(
            expanded_attention, {"q": _f(3, 4, 48), "kv": _f(5, 4, 64), "rope_keys": _f(5, 16)},
            {"nope": 32, "scale": 0.2},
        ),
        "rotate_and_store_latent": Launch(
            lambda q_rope, kv, weight, cos, sin, slot_mapping, out: rotate_and_store_latent(
                q_rope, kv, RmsNorm(weight, 1e-6), cos, sin, LatentCache(**latents), slot_mapping, out
            ),
            {"q_rope": _f(3, 4, 16), "kv": _f(3, 48), "weight": _f(32), "cos": _f(3, 16), "sin": _f(3, 16),
             "slot_mapping": slots, "out": _f(3, 4, 16)},
        ),
        "HeadsLinear": Launch(HeadsLinear, {"weight": _f(4, 6, 8)}),
        "HeadsLinear, call": Launch(HeadsLinear(_f(4, 6, 8)), {"x": _f(3, 4, 8), "out": _f(3, 4, 6)}),
        "store_kv": Launch(
            store_kv, {"k": _f(3, 2, 32), "v": _f(3, 2, 32), "slot_mapping": slots}, {"cache": _cache()}
        ),
        "rotary_and_store": Launch(
            rotary_and_store, {**rotary, "v": _f(3, 2, 32), "slot_mapping": slots}, {"cache": _cache(torch.int8)}
        ),
        "RmsNorm": Launch(
            lambda x, weight, residual: RmsNorm(weight, 1e-6).add_and_norm(x, residual),
            {"x": _f(3, 8), "weight": _f(8), "residual": _f(3, 8)},
        ),
        "silu_mul": Launch(silu_mul, {"gate_up": _f(3, 8)}),
        "copy_blocks": Launch(copy_blocks, {"pool": pool, "src": two, "dst": two + 2}),
        "transfer_blocks": Launch(
            transfer_blocks, {"source": pool, "from_rows": two, "target": pool.clone(), "to_rows": two + 2}
        ),
        "sum_blocks": Launch(sum_blocks, {"pool": pool, "rows": two}),
        "sample": Launch(sample, {"logits": _f(3, 40), **knobs}),
        "apply_penalties": Launch(
            apply_penalties,
            {"logits": _f(3, 40), "token_ids": torch.zeros(5, 4, dtype=I32), "slots": torch.arange(3), **fine},
        ),
        "apply_token_mask": Launch(
            apply_token_mask, {"logits": _f(3, 40), "rows": two, "mask": torch.zeros(2, 2, dtype=I32)}
        ),
        "add_logit_bias": Launch(
            add_logit_bias, {"logits": _f(3, 40), "rows": two, "token_ids": two, "bias": torch.ones(2)}
        ),
        "logprobs": Launch(logprobs, {"logits": _f(3, 40), "token_ids": torch.arange(3)}, {"k": 2}),
        "PackedLinear": Launch(PackedLinear, {"weight": _f(4, 6), "bias": _f(4)}),
        "PackedLinear, forward": Launch(PackedLinear(_f(4, 6)), {"x": _f(3, 6)}),
    }  # fmt: skip


def _apart(x: Tensor) -> Tensor:
    """The same elements with twice the strides."""
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "dimensions": lambda x: x[None],
    "length": lambda x: torch.cat((x, x[..., :1]), dim=-1),
    "dtype": lambda x: x.to(torch.int16 if x.dtype != torch.int16 else torch.float32),
    "stride": _apart,
    "device": lambda x: x.to("meta"),
}
# Accepted: strides that torch multiplies, the device of a single tensor, and lengths that no other tensor fixes.
FINE = {
    ("PackedLinear, forward", "x", "dimensions"), ("PackedLinear, forward", "x", "stride"),
    ("PackedLinear", "weight", "length"), ("PackedLinear", "weight", "stride"), ("PackedLinear", "bias", "stride"),
    ("paged_attention", "block_tables", "length"), ("latent_attention", "block_tables", "length"),
    ("LatentCache", "latent", "length"), ("LatentCache", "rope_keys", "length"),
    ("LatentCache, int8", "latent", "length"), ("LatentCache, int8", "rope_keys", "length"),
    ("HeadsLinear", "weight", "length"), ("HeadsLinear", "weight", "stride"), ("HeadsLinear", "weight", "dtype"),
    ("HeadsLinear", "weight", "device"), ("expanded_attention", "kv", "length"),
    ("apply_penalties", "token_ids", "length"),
    ("logprobs", "logits", "length"), ("sample", "logits", "length"), ("apply_penalties", "logits", "length"),
    ("add_logit_bias", "logits", "length"), ("copy_blocks", "pool", "length"), ("sum_blocks", "rows", "length"),
    ("apply_token_mask", "logits", "length"), ("PackedLinear", "weight", "dtype"), ("silu_mul", "gate_up", "device"),
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, str]]:
    for name, launch in launches().items():
        for tensor in launch.tensors:
            for wrong in WRONG:
                if (name, tensor, wrong) not in FINE:
                    yield name, tensor, wrong


@pytest.mark.parametrize(("name", "tensor", "wrong"), list(cases()))
def test_a_wrong_tensor_is_refused_by_its_name(name: str, tensor: str, wrong: str) -> None:
    """A tensor that is wrong in one way is refused. The message names a tensor, what was expected and what was given.

    If two tensors disagree, the message may name either.
    """
    launch = launches()[name]
    arguments = dict(launch.tensors) | {tensor: WRONG[wrong](launch.tensors[tensor])}
    with pytest.raises(LaunchRefused) as refused:
        launch.call(**arguments, **launch.others)
    said = str(refused.value)
    names = {*launch.tensors, "k_cache", "v_cache"}
    assert said.partition(":")[0] in names and "expected" in said and "got" in said, said


@pytest.mark.parametrize("name", launches())
def test_right_tensors_are_accepted(name: str) -> None:
    """The unchanged arguments are accepted, so the other test's refusals are due to the change."""
    launch = launches()[name]
    launch.call(**launch.tensors, **launch.others)
