"""A mixture of experts in C: the choice of experts, their products, and the whole sublayer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.decoder_layers import ExpertsSublayer
from coatcheck.kernels.layers.experts import PackedExperts, activate
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.route import Routing, route, route_reference
from coatcheck.kernels.layers.silu_mul import silu_mul
from tests.examples import pairwise
from tests.kernels.cpu_classes import each_class
from tests.kernels.layers.quantised_weights import multiplies_rounded_weights, random_weight

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("linear_bf16")]

EXPERTS, TOP_K, HIDDEN, INNER = 12, 3, 72, 40
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

ROUTINGS: dict[str, Routing] = {
    "softmax": Routing(EXPERTS, TOP_K),
    "renormalised": Routing(EXPERTS, TOP_K, renormalise=True, scale=2.5),
    "of chosen": Routing(EXPERTS, TOP_K, "softmax_of_chosen"),
    "v2": Routing(EXPERTS, TOP_K, groups=4, top_groups=2, scale=16.0),
    "v3": Routing(
        EXPERTS, TOP_K, "sigmoid", groups=4, top_groups=2, group_best=2, renormalise=True, epsilon=1e-20, scale=2.5,
        correction=torch.linspace(-0.5, 0.5, EXPERTS).view(3, 4).T.flatten(),
    ),
}  # fmt: skip


class Weights:
    """Random experts, as float32 values that `dtype` holds exactly."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = False) -> None:
        self.gate_up = (torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
        self.down = (torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5).to(dtype)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * INNER).to(dtype) if bias else None
        self.down_bias = torch.randn(EXPERTS, HIDDEN).to(dtype) if bias else None

    def product(self, x: Tensor, expert: int, activation: str = "silu") -> Tensor:
        """An expert's output in float32."""
        wide = x.float() @ self.gate_up[expert].float().T
        if self.gate_up_bias is not None:
            wide += self.gate_up_bias[expert].float()
        y: Tensor = activate(wide, activation, 1.7, 1.5) @ self.down[expert].float().T
        return y if self.down_bias is None else y + self.down_bias[expert].float()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 300])
def test_the_choice_is_that_of_the_reference(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Ids in their order, and weights, equal those of the torch reference; equal scores take the lower id."""
    logits = (torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)) * 2).to(dtype)
    logits[: tokens // 3] = logits[: tokens // 3].round()  # ties
    ids, weights = route(logits, ROUTINGS[name])
    want_ids, want_weights = route_reference(logits, ROUTINGS[name])
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    differ = (ids != want_ids).any(1)  # two orders of a sum may part scores that are equal in exact numbers
    assert ids.dtype == torch.int32 and differ.sum() <= tokens // 50


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_logits_choose_distinct_experts(name: str, broken: float) -> None:
    """A token never chooses an expert twice: the products have memory for one row of each token and expert."""
    logits = torch.randn(4, EXPERTS)
    logits[0, 0] = logits[1, 3:8] = logits[2, 1:] = logits[3] = broken
    ids, _ = route(logits, ROUTINGS[name])
    assert ids.min() >= 0 and ids.max() < EXPERTS
    assert [len(set(row)) for row in ids.tolist()] == 4 * [TOP_K]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu_tanh", True), ("clamped_swiglu", True)])
@pytest.mark.parametrize("tokens", [0, 1, 100])
def test_products_agree_with_float32(dtype: torch.dtype, activation: str, bias: bool, tokens: int) -> None:
    """Each token gets the weighted sum of its experts, and the gated shared rows."""
    torch.manual_seed(tokens)
    weights = Weights(dtype, bias=bias)
    experts = PackedExperts(
        weights.gate_up,
        weights.down,
        top_k=TOP_K,
        activation=activation,
        alpha=1.7,
        limit=1.5,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    assert experts.form == "native"
    x, shared, gate = (torch.randn(tokens, width).to(dtype) for width in (HIDDEN, HIDDEN, 1))
    ids = torch.rand(tokens, EXPERTS - 2).topk(TOP_K).indices.int()  # two experts get no token
    factors = torch.rand(tokens, TOP_K)
    by_expert = torch.zeros(tokens, EXPERTS).scatter_(1, ids.long(), factors)
    plain = sum(by_expert[:, e, None] * weights.product(x, e, activation) for e in range(EXPERTS))
    assert isinstance(plain, Tensor)
    for with_shared, with_gate in ((False, False), (True, False), (True, True)):
        want = plain.clone()
        if with_shared:
            want += shared.float() * (gate.float().sigmoid() if with_gate else 1.0)
        have = experts(x, ids, factors, shared if with_shared else None, gate if with_gate else None)
        torch.testing.assert_close(have.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_many_rows_are_computed_in_rounds() -> None:
    """More rows than a round takes, most of them of one expert, give the same result as few rows at a time."""
    weights = Weights(torch.float32)
    experts = PackedExperts(weights.gate_up, weights.down, top_k=2)
    x = torch.randn(5000, HIDDEN)
    ids = torch.stack([torch.full((5000,), 4), torch.arange(5000) % 4], 1).int()
    factors = torch.rand(5000, 2)
    whole = experts(x, ids, factors)
    for first in range(0, 5000, 1250):
        part = slice(first, first + 1250)
        assert torch.equal(whole[part], experts(x[part], ids[part], factors[part]))


def test_two_ranks_add_up_to_one() -> None:
    """Ranks that hold half of the experts each give parts whose sum is the whole."""
    weights = Weights(torch.float32)
    x, factors = torch.randn(20, HIDDEN), torch.rand(20, TOP_K)
    ids = torch.randint(EXPERTS, (20, TOP_K)).int()
    whole = PackedExperts(weights.gate_up, weights.down, top_k=TOP_K)(x, ids, factors)
    halves = [
        PackedExperts(weights.gate_up[part], weights.down[part], top_k=TOP_K, first=part.start)(x, ids, factors)
        for part in (slice(0, EXPERTS // 2), slice(EXPERTS // 2, EXPERTS))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "scales", "zeros"),
    [
        (CodeKind.INT8, torch.float16, torch.int8),
        (CodeKind.INT4, torch.float16, torch.int8),
        (CodeKind.INT4, torch.float32, torch.float32),
        (CodeKind.FP8, torch.float16, None),
        (CodeKind.FP4, torch.uint8, None),
        (CodeKind.FP4, torch.float8_e4m3fn, None),
    ],
)
def test_quantised_experts_give_the_products_of_their_dequantised_weights(
    dtype: torch.dtype, kind: CodeKind, scales: torch.dtype, zeros: torch.dtype | None
) -> None:
    """Experts that stay quantised give the bits of their dequantised weights, or, where the processor does not round
    these to bfloat16, results as near as a rounded sum can be. They take the bytes of their codes."""
    has_row_scales = scales == torch.float8_e4m3fn

    def experts(rows: int, columns: int, group: int) -> QuantisedExperts:
        shape = (EXPERTS * rows, columns, group, dtype)
        return QuantisedExperts(EXPERTS, random_weight(kind, *shape, scales=scales, zeros=zeros))

    gate_up, down = experts(2 * INNER, HIDDEN, 24), experts(HIDDEN, INNER, 8)
    bias = torch.randn(EXPERTS, 2 * INNER).to(dtype)
    quantised = PackedExperts(gate_up, down, top_k=TOP_K, gate_up_bias=bias)
    plain = PackedExperts(gate_up.dequantise(), down.dequantise(), top_k=TOP_K, gate_up_bias=bias)
    assert (
        len(quantised.parts[0]) == 2 + (zeros is not None) + has_row_scales
        and quantised.parts[0][0].nbytes < plain.parts[0][0].nbytes / 1.5
    )
    is_rounded = dtype == torch.float32 or multiplies_rounded_weights()
    for tokens in (1, 90):
        x = torch.randn(tokens, HIDDEN).to(dtype) / 8
        ids, factors = torch.rand(tokens, EXPERTS - 2).topk(TOP_K).indices.int(), torch.rand(tokens, TOP_K)
        got, wanted = quantised(x, ids, factors), plain(x, ids, factors)
        if is_rounded:
            assert torch.equal(got, wanted)
        else:
            largest = float(wanted.float().abs().max())
            torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=largest / 32)


def test_choices_are_counted_by_the_id_of_the_expert() -> None:
    """With the number of the layer's experts, each rank counts the choices of all of them, also of those it lacks."""
    weights = Weights(torch.float32)
    part = slice(0, EXPERTS // 2)
    experts = PackedExperts(weights.gate_up[part], weights.down[part], top_k=TOP_K, num_experts=EXPERTS)
    ids = torch.tensor([[0, 1, 11], [1, 5, 11]], dtype=torch.int32)
    for _ in range(2):
        experts(torch.randn(2, HIDDEN), ids, torch.ones(2, TOP_K))
    assert experts.chosen is not None
    assert experts.chosen.tolist() == [2, 4, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4]


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("wide_router", [False, True]),
    ("shared", [0, 24, 32]),  # 32 fill whole tiles
    ("tokens", [1, 200]),
)
def test_a_sublayer_is_its_operations_in_a_row(dtype: torch.dtype, wide_router: bool, shared: int, tokens: int) -> None:
    """The output and the new residual have the same bits as after the separate operations."""
    torch.manual_seed(tokens)
    weights = Weights(dtype)
    experts = PackedExperts(weights.gate_up, weights.down, top_k=TOP_K)
    norm = RmsNorm((torch.randn(HIDDEN) + 1).to(dtype), 1e-6, 0.0)
    router_dtype = torch.float32 if wide_router else dtype
    router = PackedLinear(torch.randn(EXPERTS, HIDDEN).to(router_dtype), torch.randn(EXPERTS).to(router_dtype))
    pair = gate = None
    if shared:
        pair = tuple(
            PackedLinear((torch.randn(*shape) / 8).to(dtype)) for shape in ((2 * shared, HIDDEN), (HIDDEN, shared))
        )
        gate = PackedLinear((torch.randn(1, HIDDEN) / 8).to(dtype))
    routing = ROUTINGS["v3"]
    x, residual = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))
    out, total = ExpertsSublayer(norm, router, routing, experts, pair, gate)(x, residual)  # type: ignore[arg-type]

    h, want_total = norm.add_and_norm(x, residual)
    chosen = route(router(h.to(router_dtype)), routing)
    rows = None if pair is None else pair[1](silu_mul(pair[0](h)))
    want = experts(h, *chosen, rows, None if gate is None else gate(h))
    assert torch.equal(out, want) and torch.equal(total, want_total)


def test_wrong_arguments_are_refused_by_name() -> None:
    """A wrong shape, dtype or setting is refused by name, and the message says what was expected."""
    weights = Weights(torch.float32)
    experts = PackedExperts(weights.gate_up, weights.down, top_k=TOP_K)
    x, ids, factors = torch.randn(4, HIDDEN), torch.zeros(4, TOP_K, dtype=torch.int32), torch.ones(4, TOP_K)
    refused = [
        ("gate_up", lambda: PackedExperts(weights.gate_up[:, :-1], weights.down, top_k=TOP_K)),
        ("down", lambda: PackedExperts(weights.gate_up, weights.down[:, :, :-1], top_k=TOP_K)),
        ("down_bias", lambda: PackedExperts(weights.gate_up, weights.down, top_k=2, down_bias=torch.zeros(1, HIDDEN))),
        ("activation", lambda: PackedExperts(weights.gate_up, weights.down, top_k=2, activation="relu")),
        ("x", lambda: experts(x[:, 1:], ids, factors)),
        ("ids", lambda: experts(x, ids.long(), factors)),
        ("weights", lambda: experts(x, ids, factors[:2])),
        ("shared_gate", lambda: experts(x, ids, factors, x, x)),
        ("logits", lambda: route(x, ROUTINGS["v2"])),
        ("scoring", lambda: Routing(8, 2, "tanh")),
        ("experts", lambda: Routing(9, 2, groups=2, top_groups=1)),
        ("top_groups", lambda: Routing(8, 2, groups=2, top_groups=3)),
        ("group_best", lambda: Routing(8, 2, groups=4, top_groups=2, group_best=3)),
        ("top_k", lambda: Routing(8, 5, groups=4, top_groups=2)),
        ("correction", lambda: Routing(8, 2, correction=torch.zeros(7))),
    ]  # fmt: skip
    for name, call in refused:
        with pytest.raises(LaunchRefused, match=f"^{name}: expected"):
            call()
