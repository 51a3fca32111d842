"""The choice of experts and their grouped products; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from coatcheck.kernels.gpu_properties import gpu_properties
from coatcheck.kernels.layers import grouped_gemm
from coatcheck.kernels.layers.experts import PackedExperts, activate
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows_reference
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.layers.route import Routing, route, route_reference
from tests.kernels.layers.quantised_weights import random_weight
from tests.kernels.triton.agreement import agree

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 72, 40


def routes(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Every way to choose, with numbers of experts and of groups that are no powers of two."""
    torch.manual_seed(0)
    correction = torch.linspace(-0.5, 0.5, 12).view(3, 4).T.flatten()
    ways = [
        Routing(12, 3),
        Routing(12, 3, renormalise=True, scale=2.5),
        Routing(6, 1, "softmax_of_chosen"),
        Routing(12, 4, "softmax_of_chosen"),
        Routing(12, 3, groups=4, top_groups=2, scale=16.0),
        Routing(12, 3, "sigmoid", groups=3, top_groups=2, group_best=2, renormalise=True, epsilon=1e-20, scale=2.5),
    ]
    ways.append(replace(ways[-1], correction=correction))
    for dtype in dtypes:
        for way in ways:
            logits = (torch.randn(5, way.experts) * 2).to(dtype)
            logits[0] = 0.0  # ties: the lower ids first
            (ids, weights), (want_ids, want_weights) = route(logits, way), route_reference(logits, way)
            assert torch.equal(ids, want_ids), way
            torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


def products(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Tiles of both heights, biases, activations, shared rows, experts without a token, and those of another rank."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for tokens in (1, 5, 3 * 32 * EXPERTS // TOP_K + 1):  # the last takes high tiles
            for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
                if tokens > 5 and activation != "silu":
                    continue
                product(dtype, tokens, activation)
        for batch_invariant in (False, True):
            neighbours(dtype, batch_invariant)
        for kind, group, scales, zeros in _CODES if dtype == dtypes[0] else _CODES[:2]:
            is_high = kind is CodeKind.INT4 and dtype == dtypes[0]
            quantised_product(dtype, kind, group, scales, zeros, tokens=32 * EXPERTS // TOP_K + 1 if is_high else 5)
    warmed_up()
    a_part()
    experts = experts_of(torch.float32)[0]
    none = torch.zeros(0, HIDDEN)
    assert experts(none, torch.zeros(0, TOP_K, dtype=torch.int32), torch.zeros(0, TOP_K)).shape == (0, HIDDEN)


def product(dtype: torch.dtype, tokens: int, activation: str) -> None:
    has_bias = activation == "clamped_swiglu"
    experts, gate_up, down, biases = experts_of(dtype, activation, has_bias)
    x, shared, gate = (torch.randn(tokens, width).to(dtype) for width in (HIDDEN, HIDDEN, 1))
    # Expert 0 gets no token, and expert 5 is another rank's.
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] + 1 for _ in range(tokens)]).int()
    factors = torch.rand(tokens, TOP_K)
    want = torch.zeros(tokens, HIDDEN)
    for expert in range(EXPERTS - 1):
        wide = x.float() @ gate_up[expert].float().T + biases[0][expert].float()
        gated = activate(wide, activation, 1.7, 1.5).to(dtype).float()
        y = (gated @ down[expert].float().T + biases[1][expert].float()).to(dtype).float()
        want += ((ids == expert) * factors).sum(1, keepdim=True) * y
    agree_on_sums(experts(x, ids, factors), want.to(dtype))
    agree_on_sums(experts(x, ids, factors, shared, gate), (want + shared.float() * gate.float().sigmoid()).to(dtype))


# Kind, columns of a group, dtypes of the scales and of the zero points.
_CODES = (
    (CodeKind.INT4, 32, torch.float16, torch.int8),
    (CodeKind.INT4, 32, torch.float32, torch.float32),
    (CodeKind.INT8, 72, torch.float32, None),
    (CodeKind.FP8, 16, torch.float32, None),
    (CodeKind.FP4, 32, torch.uint8, None),
)


def quantised_product(
    dtype: torch.dtype, kind: CodeKind, group: int, scales: torch.dtype, zeros: torch.dtype | None, tokens: int
) -> None:
    """Experts over codes give what experts over the dequantised weights give; one group of a row, or several."""
    gate_up, down = (
        random_weight(kind, rows * EXPERTS, columns, min(group, columns), dtype, scales=scales, zeros=zeros)
        for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    both = [
        QuantisedExperts(EXPERTS, replace(weight, scales=weight.scales if scales == torch.uint8 else weight.scales / 8))
        for weight in (gate_up, down)
    ]
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    x, factors = torch.randn(tokens, HIDDEN).to(dtype), torch.rand(tokens, TOP_K)
    settings = dict(top_k=TOP_K, activation="clamped_swiglu", alpha=1.7, limit=1.5)
    biases = dict(
        gate_up_bias=torch.randn(EXPERTS, 2 * INNER).to(dtype), down_bias=torch.randn(EXPERTS, HIDDEN).to(dtype)
    )
    quantised = PackedExperts(both[0], both[1], **settings, **biases)  # type: ignore[arg-type]
    plain = PackedExperts(both[0].dequantise(), both[1].dequantise(), **settings, **biases)  # type: ignore[arg-type]
    assert len(quantised.parts[0]) > 1 == len(plain.parts[0])  # codes with scales beside the weight itself
    have, want = quantised(x, ids, factors).float(), plain(x, ids, factors).float()
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    assert (have - want).norm() < bound * want.norm()


# Kinds and groups of gate_up and of down, 0 for a row; hidden and inner columns.
_W8A8 = (
    (CodeKind.FP8, 128, CodeKind.FP8, 128, 320, 160),  # codes are written by gate_up
    (CodeKind.FP8, 128, CodeKind.FP8, 32, 144, 96),  # as a rank holds them whose columns end inside blocks
    (CodeKind.FP8, 0, CodeKind.FP8, 0, 144, 80),
    (CodeKind.INT8, 0, CodeKind.INT8, 0, 80, 48),
    (CodeKind.FP8, 0, CodeKind.FP8, 256, 80, 272),  # groups that no tile holds
    (CodeKind.INT8, 32, CodeKind.INT4, 32, 64, 64),  # down keeps its activations
    (CodeKind.INT4, 32, CodeKind.INT8, 64, 64, 80),  # gate_up does
)


def quantised_experts(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Experts over codes and quantised activations give the float32 products of the same codes and scales."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for place, case in enumerate(_W8A8 if dtype == torch.float32 else _W8A8[:1]):
            is_high = dtype == torch.float32 and place == 3
            w8a8_product(dtype, 32 * EXPERTS // TOP_K + 1 if is_high else 5, *case)
        broken_tokens(dtype)


def w8a8_product(
    dtype: torch.dtype, tokens: int, kind: CodeKind, group: int, down_kind: CodeKind, down_group: int, hidden: int,
    inner: int,
) -> None:  # fmt: skip
    gate_up, down = (
        replace(weight, scales=(weight.scales / 8).to(dtype), quantises_activations=weight.kind.bits == 8)
        for weight in (
            random_weight(kind, rows * EXPERTS, columns, of or columns, dtype)
            for kind, rows, columns, of in ((kind, 2 * inner, hidden, group), (down_kind, hidden, inner, down_group))
        )
    )
    formats = [
        RowFormat(weight.kind, of) if weight.kind.bits == 8 else None
        for weight, of in ((gate_up, group), (down, down_group))
    ]
    settings: dict[str, Any] = dict(top_k=TOP_K, activation="clamped_swiglu", alpha=1.7, limit=1.5)
    biases: dict[str, Any] = dict(
        gate_up_bias=torch.randn(EXPERTS, 2 * inner).to(dtype), down_bias=torch.randn(EXPERTS, hidden).to(dtype)
    )
    both = [QuantisedExperts(EXPERTS, weight) for weight in (gate_up, down)]
    experts = PackedExperts(both[0], both[1], **settings, **biases)
    assert [choice and choice.format for choice in experts.activations] == formats
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    x, factors = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, TOP_K)
    want = torch.zeros(tokens, hidden)
    wide_gate_up, wide_down = (
        weight.dequantise(torch.float32 if weight.kind.bits == 8 else dtype).float().view(EXPERTS, -1, weight.shape[1])
        for weight in (gate_up, down)
    )
    for expert in range(EXPERTS):
        wide = rounded(x, formats[0]) @ wide_gate_up[expert].T + biases["gate_up_bias"][expert].float()
        gated = activate(wide, "clamped_swiglu", 1.7, 1.5).to(dtype)
        y = rounded(gated, formats[1]) @ wide_down[expert].T + biases["down_bias"][expert].float()
        want += ((ids == expert) * factors).sum(1, keepdim=True) * y.to(dtype).float()
    have = experts(x, ids, factors)
    bound = {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[dtype]
    if x.is_cuda and kind is CodeKind.FP8:
        # A GPU adds FP8 products with fewer bits than float32, so a few gated values get the next code, 6% off.
        bound = max(bound, 6e-3)
    error = float((have.float() - want).norm() / want.norm())
    assert error < bound, (kind, group, down_group, tokens, dtype, error)
    if formats[0] is not None:
        codes = quantise_rows_reference(x, formats[0])
        assert experts.row_format == formats[0] and torch.equal(experts(codes, ids, factors), have)
    if formats[0] is not None and formats[1] is not None:
        # gate_up writes the codes that a kernel behind it would write.
        with patch.object(grouped_gemm, "is_written_as_codes", lambda *_: False):
            assert torch.equal(experts(x, ids, factors), have)


def broken_tokens(dtype: torch.dtype) -> None:
    """A token with a NaN gets NaN from experts of plain weights and of codes, whose activation clamps gates and ups. So
    does one with an infinity where activations are quantised, both where gate_up writes codes and where it does not."""
    for group in (None, 0, 128):
        biases: dict[str, Any] = dict(gate_up_bias=torch.zeros(EXPERTS, 2 * INNER, dtype=dtype), down_bias=None)
        parts: list[Any] = [torch.randn(EXPERTS, *shape).to(dtype) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
        if group is not None:
            parts = [
                QuantisedExperts(EXPERTS, replace(weight, quantises_activations=True))
                for weight in (
                    random_weight(CodeKind.FP8, part[..., 0].numel(), part.shape[2], group or part.shape[2], dtype)
                    for part in parts
                )
            ]
        experts = PackedExperts(*parts, top_k=TOP_K, activation="clamped_swiglu", alpha=1.7, limit=1.5, **biases)
        ids, factors = torch.tensor([[1, 2]] * 4).int(), torch.ones(4, TOP_K)
        x = torch.randn(4, HIDDEN).to(dtype)
        healthy = experts(x, ids, factors)
        x[0, 5], x[3, 0] = torch.nan, torch.nan if group is None else torch.inf
        out = experts(x, ids, factors)
        assert out[[0, 3]].isnan().all() and torch.equal(out[1:3], healthy[1:3])


def rounded(x: Tensor, format: RowFormat | None) -> Tensor:
    """float32 of x as the product reads it."""
    return x.float() if format is None else quantise_rows_reference(x, format).dequantise()


def agree_on_sums(have: Tensor, want: Tensor) -> None:
    """Gated rows and each expert's output are rounded to the dtype before they are summed. In bfloat16 another order of
    a product's sum may round one of them the other way."""
    if have.dtype == torch.bfloat16:
        torch.testing.assert_close(have, want, rtol=1.5e-2, atol=1.5e-2)
    else:
        agree(have, want)


def experts_of(
    dtype: torch.dtype, activation: str = "silu", has_bias: bool = False, batch_invariant: bool = False
) -> tuple[PackedExperts, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The experts of a rank that lacks the last one, with their weights."""
    gate_up = (torch.randn(EXPERTS - 1, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(EXPERTS - 1, HIDDEN, INNER) / INNER**0.5).to(dtype)
    biases = tuple((torch.randn(EXPERTS - 1, n) * has_bias).to(dtype) for n in (2 * INNER, HIDDEN))
    experts = PackedExperts(
        gate_up, down, top_k=TOP_K, activation=activation, alpha=1.7, limit=1.5, batch_invariant=batch_invariant,
        gate_up_bias=biases[0] if has_bias else None, down_bias=biases[1] if has_bias else None,
    )  # fmt: skip
    assert experts.form == "triton"
    return experts, gate_up, down, (biases[0], biases[1])


def warmed_up() -> None:
    """The warm-up computes no more tokens than the largest step has."""
    experts = experts_of(torch.float32)[0]
    with patch.object(PackedExperts, "forward") as forward:
        experts.compile_kernels(40)
        few = [len(call.args[0]) for call in forward.call_args_list]
        experts.compile_kernels(10_000)
    assert few and max(few) <= 40 and forward.call_count > 2 * len(few)


def a_part() -> None:
    """A rank that holds a quarter of the experts picks the tiles of a rank with all, for as many rows an expert, and
    computes its part with each of them."""
    count, part = 8, 2
    gate_up, down = torch.randn(count, 2 * INNER, HIDDEN) / HIDDEN**0.5, torch.randn(count, HIDDEN, INNER) / INNER**0.5
    whole = PackedExperts(gate_up, down, top_k=2)
    ranks = [
        PackedExperts(gate_up[at : at + part], down[at : at + part], top_k=2, first=at, num_experts=count)
        for at in range(0, count, part)
    ]
    for tokens in (1, 16 * count // 2, 16 * count // 2 + 1):
        x, ids = torch.randn(tokens, HIDDEN), torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).int()
        factors = torch.rand(tokens, 2)
        with patch.object(grouped_gemm, "pick_launch", wraps=grouped_gemm.pick_launch) as picked:
            want = whole(x, ids, factors)
            have = torch.stack([rank(x, ids, factors) for rank in ranks]).sum(0)
        assert {call.args[:2] for call in picked.call_args_list} == {(2 * tokens, count)}
        agree_on_sums(have, want)
    with patch.object(PackedExperts, "forward") as forward:
        for rank in (whole, ranks[1]):
            rank.compile_kernels(10_000)
    lengths = [len(call.args[0]) for call in forward.call_args_list]
    assert lengths[: len(lengths) // 2] == lengths[len(lengths) // 2 :] == [1, 65, 513]


def neighbours(dtype: torch.dtype, batch_invariant: bool) -> None:
    """With `batch_invariant` few and many tokens take tiles of one height, and a token has the same bits in both."""
    launches = {
        grouped_gemm.pick_launch(pairs, EXPERTS, dtype.itemsize, gpu_properties(torch.get_default_device()),
                                 batch_invariant=batch_invariant)
        for pairs in (2, 10_000)
    }  # fmt: skip
    assert len(launches) == (1 if batch_invariant else 2)
    experts = experts_of(dtype, batch_invariant=batch_invariant)[0]
    tokens = 3 * 32 * EXPERTS // TOP_K + 1
    x, ids, factors = (
        torch.randn(tokens, HIDDEN).to(dtype),
        torch.randint(EXPERTS, (tokens, TOP_K)).int(),
        torch.rand(tokens, TOP_K),
    )
    whole = experts(x, ids, factors)
    for part in (slice(0, 1), slice(7, 20)):
        alone = experts(x[part], ids[part], factors[part])
        if batch_invariant:
            assert torch.equal(alone, whole[part])
        else:
            agree_on_sums(alone, whole[part])
