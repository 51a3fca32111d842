"""SparseMlp: the mixture of experts of a decoder layer, built from transformers' modules.

    h = norm(x + residual),  experts chosen by router(h),  out = weighted sum of their outputs + shared expert(h)

`_ROUTERS` has the Routing (kernels/layers/route.py) of each of transformers' routers that is known. A block with
another router keeps transformers' code for its router, and has PackedExperts in place of its experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from coatcheck.kernels.layers.decoder_layers import ExpertsSublayer, is_native
from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, RowFormat, quantise_rows
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.route import Routing, route
from coatcheck.kernels.layers.silu_mul import silu_mul_for_linear
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.model.packed_linears import pack_merged, pack_row_parallel
from coatcheck.workers.model.parallel_layers import RankSum, TensorParallelExperts, norm_for_linear

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' name -> ours


class SparseMlp:
    """(x, residual) -> (experts(h), x + residual), with h = norm(x + residual)."""

    def __init__(self, block: Any, norm: RmsNorm, *, batch_invariant: bool) -> None:
        """`block`: transformers' module, one that `is_known_block` accepts."""
        self.norm = norm
        self.moe = MixtureOfExperts(block, batch_invariant=batch_invariant)
        self.reduce = self.moe.reduce
        self.native_sublayer = self.moe.native_sublayer(norm)

    def linears(self) -> list[PackedLinear]:
        return self.moe.linears()

    def __call__(self, x: Tensor, residual: Tensor, deferred_sum: RankSum | None) -> tuple[Tensor, Tensor]:
        """(output, x + residual), both [T, hidden]. `deferred_sum`: the all-reduce that `x` still needs."""
        if self.native_sublayer is not None:
            x, residual = self.native_sublayer(x if deferred_sum is None else deferred_sum(x), residual)
        else:
            format = self.moe.row_format
            normed, residual = norm_for_linear(self.norm, x, residual, deferred_sum, format, keeps_plain=True)
            x = self.moe(normed)
        return (x if self.reduce is None else self.reduce(x)), residual


class MixtureOfExperts:
    """Router, experts and shared expert of one of transformers' blocks: [T, hidden] -> [T, hidden].

    `reduce`: the all-reduce of the ranks' outputs; None in a group of one rank. The caller applies it.
    """

    def __init__(self, block: Any, *, batch_invariant: bool) -> None:
        module, self.reduce, first = unwrap_experts(block.experts)
        router = _router_of(block)
        read, in_float32 = _ROUTERS[type(router).__name__]
        self.routing = read(router)
        linear = getattr(router, "classifier", router)  # in longcat_flash, whose code ignores the linear's bias
        weight, bias = linear.weight.detach(), getattr(router, "bias", None)
        if in_float32:
            weight = weight.float()
        self.router = PackedLinear(weight, bias, batch_invariant=batch_invariant)
        self.experts = pack_experts(module, self.routing.top_k, first=first, batch_invariant=batch_invariant)
        # From this id on the experts of longcat_flash are identities without weights. One rank adds their outputs.
        self._first_identity = module.num_routed_experts if getattr(module, "zero_expert_num", 0) else None
        self._adds_identity = self.reduce is None or block.experts.rank == 0
        self.shared: tuple[PackedLinear, PackedLinear] | None = None
        self.shared_gate: PackedLinear | None = None
        shared = next((getattr(block, name) for name in _SHARED if hasattr(block, name)), None)
        if shared is not None:
            gate_up = pack_merged(shared, "gate_up_proj", ("gate_proj", "up_proj"), batch_invariant=batch_invariant)
            self.shared = gate_up, pack_row_parallel(shared.down_proj, batch_invariant=batch_invariant)[0]
        if hasattr(block, "shared_expert_gate"):
            self.shared_gate = PackedLinear(block.shared_expert_gate.weight, batch_invariant=batch_invariant)

    @property
    def row_format(self) -> RowFormat | None:
        """The format in which the experts read x; None: unquantised. A shared expert with the same format reads the
        same quantised rows."""
        return self.experts.row_format

    def __call__(self, x: Tensor | QuantisedRows) -> Tensor:
        """This rank's part of the output [T, hidden], before the all-reduce. `x`: [T, hidden], or QuantisedRows with
        `plain` if a norm has quantised it to `row_format`."""
        rows = x
        if isinstance(x, QuantisedRows):
            plain = x.plain
            assert plain is not None, "the router reads x unquantised"
        else:
            plain = x
            if self.row_format is not None:
                rows = quantise_rows(x, self.row_format)
        ids, weights = route(self.router(plain.to(self.router.dtype)), self.routing)
        shared = gate = None
        if self.shared is not None:
            gate_up, down = self.shared
            wide = gate_up(rows if gate_up.row_format == self.row_format else plain)
            shared = down(silu_mul_for_linear(wide, self.experts.activation, down.row_format))
        if self.shared_gate is not None:
            gate = self.shared_gate(plain)
        out: Tensor = self.experts(rows, ids, weights, shared, gate)
        if self._first_identity is not None and self._adds_identity:
            kept = (weights * (ids >= self._first_identity)).sum(1, keepdim=True)
            out = (out.float() + kept * plain.float()).to(plain.dtype)
        return out

    def linears(self) -> list[PackedLinear]:
        """Router and shared expert."""
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return [self.router, *(self.shared or ()), *gate]

    def native_sublayer(self, norm: RmsNorm) -> ExpertsSublayer | None:
        """Norm and block as one call into C; None if the C library does not compute these weights."""
        others = () if self.shared is None else self.shared
        if self._first_identity is not None or not is_native(self.router, self.experts, *others):
            return None
        return ExpertsSublayer(norm, self.router, self.routing, self.experts, self.shared, self.shared_gate)


class PackedBlock(nn.Module):
    """A MixtureOfExperts in the place of transformers' block, within transformers' decoder layer."""

    def __init__(self, block: nn.Module, *, batch_invariant: bool) -> None:
        super().__init__()
        self._moe = MixtureOfExperts(block, batch_invariant=batch_invariant)
        self.experts = self._moe.experts  # registered here, so that TransformersBody.experts finds it
        self._norm: nn.Module | None = getattr(block, "post_mlp_layernorm", None)  # axk1
        self._returns_scores = type(block).__name__ == "GptOssMLP"

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, None]:
        out = self._moe(hidden.flatten(0, -2).contiguous())
        out = (out if self._moe.reduce is None else self._moe.reduce(out)).view(hidden.shape)
        out = out if self._norm is None else self._norm(out)
        return (out, None) if self._returns_scores else out


class ExpertsAdapter(nn.Module):
    """PackedExperts behind the signature of transformers' experts, for blocks whose router is not known."""

    def __init__(self, experts: PackedExperts, reduce: RankSum | None) -> None:
        super().__init__()
        self.experts = experts
        self._reduce = reduce

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids, weights = top_k_index.to(torch.int32), top_k_weights.float()
        out: Tensor = self.experts(hidden.contiguous(), ids.contiguous(), weights.contiguous())
        return out if self._reduce is None else self._reduce(out)


def replace_experts(module: nn.Module, *, batch_invariant: bool) -> None:
    """Replace every mixture of experts below `module`: whole blocks where the router is known, else the experts."""
    for name, child in module.named_children():
        if is_known_block(child):
            setattr(module, name, PackedBlock(child, batch_invariant=batch_invariant))
        elif is_experts(unwrap_experts(child)[0]):
            plain, reduce, first = unwrap_experts(child)
            experts = pack_experts(plain, _top_k(module), first=first, batch_invariant=batch_invariant)
            setattr(module, name, ExpertsAdapter(experts, reduce))
        else:
            replace_experts(child, batch_invariant=batch_invariant)


def missing_tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """The sharding styles that transformers' own tp_plan may lack: those of gpt-oss' experts, and with transformers
    5.17 those of many other experts and of nemotron's MLP. See plan_sharding, where transformers' styles come first."""
    plan: dict[str, str] = {}
    if model.config.model_type == "nemotron":
        plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    for name, module in model.named_modules():
        if is_experts(module):
            is_gpt_oss = type(module).__name__ == "GptOssExperts"
            gate_up, down = ("pairs_of_columns", "rows_of_experts") if is_gpt_oss else ("packed_colwise", "rowwise")
            columns = dict.fromkeys((f"{name}.gate_up_proj", f"{name}.gate_up_proj_bias"), gate_up)
            plan |= {name: "moe_tp_experts", **columns, f"{name}.down_proj": down}
    return plan


def is_known_block(block: Any) -> bool:
    """Whether MixtureOfExperts computes what transformers' block does."""
    if type(block).__name__ not in _BLOCKS or type(_router_of(block)).__name__ not in _ROUTERS:
        return False
    return is_experts(unwrap_experts(block.experts)[0])


def is_experts(module: Any) -> bool:
    """Whether PackedExperts computes what transformers' experts do. transformers 5.17 has no `has_post_expert_norm`."""
    if type(module).__name__ == "LongcatFlashExperts":
        return activation_of(module.act_fn) is not None and module.gate_up_proj is not None
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        return False
    return type(module).__name__ in ("GptOssExperts", "MiniMaxM3VLExperts") or (
        type(module)._apply_gate is _default_apply_gate
        and not module.has_bias
        and not module.is_transposed
        and activation_of(module.act_fn) is not None
    )


def pack_experts(module: Any, top_k: int, *, first: int, batch_invariant: bool) -> PackedExperts:
    """PackedExperts with the weights of transformers' module of experts, which passes `is_experts`. `first`: the id of
    the module's first expert."""
    gate_up, down = (
        weight if isinstance(weight, QuantisedExperts) else weight.detach()
        for weight in (module.gate_up_proj, module.down_proj)
    )
    if type(module).__name__ != "GptOssExperts":
        is_clamped = type(module).__name__ == "MiniMaxM3VLExperts"
        activation = "clamped_swiglu" if is_clamped else activation_of(module.act_fn)
        assert activation is not None
        limits = dict(alpha=module.swiglu_alpha, limit=module.swiglu_limit) if is_clamped else {}
        # In longcat_flash this counts the experts without weights, too, because tokens choose them.
        count = getattr(module, "total_experts", getattr(module, "num_experts", None))
        return PackedExperts(
            gate_up, down, top_k=top_k, activation=activation, first=first, batch_invariant=batch_invariant,
            num_experts=count, **limits,
        )  # fmt: skip
    # gpt-oss interleaves the rows of gate and up, and stores unquantised weights as [experts, in, out].
    bias = module.gate_up_proj_bias.detach()
    order = torch.cat((torch.arange(0, bias.shape[1], 2), torch.arange(1, bias.shape[1], 2)))
    return PackedExperts(
        gate_up.transpose(1, 2)[:, order] if isinstance(gate_up, Tensor) else gate_up.select_rows(order),
        down.transpose(1, 2) if isinstance(down, Tensor) else down,
        top_k=top_k,
        gate_up_bias=bias[:, order],
        down_bias=module.down_proj_bias.detach(),
        activation="clamped_swiglu",
        alpha=module.alpha,
        limit=module.limit,
        first=first,
        batch_invariant=batch_invariant,
        num_experts=module.num_experts,
    )


def unwrap_experts(experts: Any) -> tuple[Any, RankSum | None, int]:
    """transformers' experts, the all-reduce of their outputs, and the id of the first expert."""
    is_part = isinstance(experts, TensorParallelExperts)
    return (experts.experts, experts.reduce, experts.first) if is_part else (experts, None, 0)


def drop_weights_of_identity_experts(model: nn.Module) -> None:
    """Drop the gate and up weights that transformers creates for the identity experts of longcat_flash. No published
    checkpoint has them, and no code reads them. `model`: on the meta device."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if type(module).__name__ == "LongcatFlashExperts" and module.gate_up_proj is not None:
            gate_up = module.gate_up_proj[: module.num_routed_experts]
            module.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)


def router_linears(model: nn.Module) -> set[nn.Module]:
    """The linears of the routers that MixtureOfExperts replaces. It does not matter that transformers' code reads their
    weights directly."""
    routers = [_router_of(block) for block in model.modules() if is_known_block(block)]
    return {module for router in routers for module in router.modules() if isinstance(module, nn.Linear)}


def packable_experts(model: nn.Module) -> frozenset[nn.Module]:
    """transformers' modules of experts that PackedExperts replaces."""
    return frozenset(module for module in model.modules() if is_experts(module))


def check_expert_parallel(model: PreTrainedModel) -> None:
    """Raise InvalidConfig if --expert-parallel cannot place the model's experts."""
    kind = model.config.model_type
    experts = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if not experts:
        raise InvalidConfig(f"expert-parallel: {kind} has no experts; leave --expert-parallel out")
    for name, module in experts:
        if not is_experts(module):
            raise InvalidConfig(
                f"expert-parallel: {name} of {kind} runs transformers' own code, which needs all experts; leave "
                "--expert-parallel out"
            )


def activation_of(function: Any) -> str | None:
    """Our name of an activation of transformers; None if there is no kernel for it."""
    if function is functional.silu:  # lfm2_moe
        return "silu"
    names = (ours for name, ours in ACTIVATIONS.items() if type(function) is type(ACT2FN[name]))
    return next(names, None)


def _router_of(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


def _top_k(block: Any) -> int:
    if hasattr(block, "top_k"):
        return int(block.top_k)
    router = _router_of(block)
    return int(router.top_k if hasattr(router, "top_k") else router.config.top_k_experts)  # the latter: Gemma 4


_BLOCKS = frozenset(
    {
        "AXK1MoE", "DeepseekV2Moe", "DeepseekV3MoE", "Dots1MoE", "Glm4MoeLiteMoE", "Glm4MoeMoE", "GptOssMLP",
        "JambaSparseMoeBlock", "KimiLinearMoE", "LongcatFlashMoE", "MiMoV2FlashMoE", "MiniMaxSparseMoeBlock",
        "MixtralSparseMoeBlock",
        "OlmoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock",
        "Qwen3_5MoeSparseMoeBlock",
    }
)  # fmt: skip
_SHARED = ("shared_expert", "shared_experts")


def _softmax(router: Any) -> Routing:
    # Routers without the field renormalise, except jamba's.
    renormalise = getattr(router, "norm_topk_prob", type(router).__name__ != "JambaTopKRouter")
    return Routing(router.num_experts, router.top_k, renormalise=renormalise)


def _softmax_of_chosen(router: Any) -> Routing:
    return Routing(router.num_experts, router.top_k, "softmax_of_chosen")


def _deepseek_v2(router: Any) -> Routing:
    groups, top_groups = router.num_group, router.topk_group
    if router.topk_method == "greedy":
        groups = top_groups = 1
    scale = router.routed_scaling_factor
    return Routing(router.num_experts, router.top_k, groups=groups, top_groups=top_groups, scale=scale)


def _deepseek_v3(router: Any) -> Routing:
    return Routing(
        router.num_experts,
        router.top_k,
        "sigmoid",
        groups=router.num_group,
        top_groups=router.topk_group,
        group_best=2,
        renormalise=router.norm_topk_prob,
        epsilon=1e-20,
        scale=router.routed_scaling_factor,
        correction=router.e_score_correction_bias.detach().float(),
    )


def _longcat(router: Any) -> Routing:
    return Routing(
        router.n_routed_experts,  # includes the identity experts
        router.top_k,
        scale=router.routed_scaling_factor,
        correction=router.e_score_correction_bias.detach().float(),
    )


# By the class of transformers' router: a function that reads its Routing, and whether it computes logits in float32.
_ROUTERS: dict[str, tuple[Callable[[Any], Routing], bool]] = {
    **dict.fromkeys(
        (
            "JambaTopKRouter",
            "MiniMaxTopKRouter",
            "MixtralTopKRouter",
            "OlmoeTopKRouter",
            "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter",
            "Qwen3_5MoeTopKRouter",
        ),
        (_softmax, False),
    ),
    "GptOssTopKRouter": (_softmax_of_chosen, False),
    "DeepseekV2TopkRouter": (_deepseek_v2, True),
    "LongcatFlashTopkRouter": (_longcat, True),
    **dict.fromkeys(
        (
            "AXK1TopkRouter",
            "DeepseekV3TopkRouter",
            "Dots1TopkRouter",
            "Glm4MoeLiteTopkRouter",
            "Glm4MoeTopkRouter",
            "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter",
        ),
        (_deepseek_v3, True),
    ),
}
