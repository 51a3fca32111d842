"""The sharding plan: which slice of every parameter a rank loads, and which modules communicate with the other ranks.

The plan follows the architecture's `tp_plan` in transformers, except for attention, which is always split by whole
heads. For phi3's fused QKV, and olmo2's norm over all heads, transformers gathers the activations instead.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.state_layers import StateLayer
from coatcheck.workers.core.model_spec import DeltaNetSpec, LightningSpec, MambaSpec
from coatcheck.workers.distributed.tensor_slice import Range, TensorSlice
from coatcheck.workers.distributed.tp_shard import TpShard

Shape = tuple[int, ...]

_SHARED_EXPERT = (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))


class ParallelRole(Enum):
    """How a module combines the ranks' outputs; see parallel_layers.py. A column-parallel linear has no role."""

    ROW = "a row-parallel linear: partial sums are all-reduced"
    EXPERTS = "a module of experts: partial sums are all-reduced"
    EMBEDDING = "a vocabulary-parallel embedding: rows of other ranks are zeros, then an all-reduce"
    LM_HEAD = "a vocabulary-parallel head: logits are all-gathered"
    QK_NORM = "a norm over all heads: the mean square is all-reduced"


@dataclass(slots=True)
class ShardingPlan:
    """`slices`: by parameter name; a rank holds all of a parameter that is absent. `roles`: by module name."""

    slices: dict[str, TensorSlice] = field(default_factory=dict)
    roles: dict[str, ParallelRole] = field(default_factory=dict)


def plan_sharding(
    shapes: dict[str, Shape],
    tp_plan: dict[str, str],
    layers: list[AttentionLayer],
    embedding: str,
    lm_head: str,
    shard: TpShard,
    *,
    expert_parallel: bool = False,
    whole: Collection[str] = (),
    states: Collection[StateLayer] = (),
) -> ShardingPlan:
    """Plan one rank's shard.

    `shapes`: of all parameters, unsharded.
    `tp_plan`: {module or parameter name, with `*` for a layer index: style}. Styles are those of transformers, and two
    for experts stored as [experts, in, out]: "pairs_of_columns" splits columns in which gate and up alternate, and
    "rows_of_experts" splits the rows of the down projection.
    `embedding`, `lm_head`: the names of these modules.
    `expert_parallel`: a rank holds whole experts instead of a part of each.
    `whole`: modules that every rank computes whole, whatever `tp_plan` says.
    `states`: the layers that keep a state, which are split by heads or channels.
    Raises InvalidConfig if `shard.size` does not divide a dimension, InvalidModel for a style that is not supported.
    """
    plan = ShardingPlan()
    if shard.size == 1:
        return plan
    if not tp_plan and layers:
        raise InvalidModel("this architecture has no tensor-parallel plan in transformers; serve it with tp 1")
    for module, role in ((embedding, ParallelRole.EMBEDDING), (lm_head, ParallelRole.LM_HEAD)):
        plan.roles[module] = role
        for leaf in ("weight", "bias"):
            if (name := f"{module}.{leaf}") in shapes:
                plan.slices[name] = TensorSlice(0, (shard.vocab_rows(shapes[name][0]),))
    for layer in layers:
        shard_one = _shard_latent_attention if layer.is_latent else _shard_attention
        shard_one(plan, shapes, layer, shard)
    for state in states:
        shard.shard_state(state.spec)  # raises InvalidConfig
        if isinstance(state.spec, MambaSpec):
            _shard_mamba(plan, shapes, state.module, state.spec, shard)
        elif isinstance(state.spec, LightningSpec):
            _shard_lightning(plan, state.module, state.spec, shard)
        else:
            assert isinstance(state.spec, DeltaNetSpec)
            _shard_delta_net(plan, shapes, state.module, state.spec, shard)
    attention = {layer.module for layer in layers} | {state.module for state in states}
    styles = [(re.compile(re.escape(k).replace(r"\*", r"\d+")), style) for k, style in tp_plan.items()]
    if "moe_tp_experts" in tp_plan.values():  # qwen2_moe's plan lacks the shared expert, jamba's the dense MLPs
        pattern = r".*\.(shared_experts?|feed_forward)\."
        styles += [(re.compile(rf"{pattern}{name}_proj"), style) for name, style in _SHARED_EXPERT]
    # An entry of tp_plan names a parameter (of experts), or a module, for its weight and bias.
    parents = {_parent(name) for name in shapes}
    grandparents = {_parent(name) for name in parents} - {""}
    for name in sorted({*shapes, *parents, *grandparents}):
        style = next((style for pattern, style in styles if pattern.fullmatch(name)), None)
        is_attention = name in attention or _parent(name) in attention
        if style is None or name in plan.roles or is_attention or _is_below(name, whole):
            continue
        if not (expert_parallel and ParallelRole.EXPERTS in (plan.roles.get(name), plan.roles.get(_parent(name)))):
            _shard_by_style(plan, shapes, name, style, shard)
        if expert_parallel and plan.roles.get(name) is ParallelRole.EXPERTS:
            _shard_whole_experts(plan, shapes, name, shard)
    return plan


def _shard_whole_experts(plan: ShardingPlan, shapes: dict[str, Shape], module: str, shard: TpShard) -> None:
    """Split the experts of `module`, all of whose parameters have the experts as their first dimension."""
    for name in [name for name in shapes if _parent(name) == module]:
        experts = shard.split_evenly(shapes[name][0], f"the experts of {module}")
        plan.slices[name] = TensorSlice(0, (experts,))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_below(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _shard_attention(plan: ShardingPlan, shapes: dict[str, Shape], layer: AttentionLayer, shard: TpShard) -> None:
    """Split one attention module by heads. Raises InvalidModel for unknown tensors, because a wrong split would give
    wrong answers."""
    q, kv = shard.query_rows(layer), shard.kv_rows(layer)
    q_rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    k_in_qkv, v_in_qkv = _shift(kv, q_rows), _shift(kv, q_rows + kv_rows)
    v, out = _rescale(kv, layer.head_dim, layer.output_dim), _rescale(q, layer.head_dim, layer.output_dim)
    v_rows, out_columns = layer.num_kv_heads * layer.output_dim, layer.num_heads * layer.output_dim
    column_parallel = {  # (rows of all ranks, this rank's)
        "q_proj": (q_rows, (q,)),
        "k_proj": (kv_rows, (kv,)),
        "v_proj": (v_rows, (v,)),
        "qkv_proj": (q_rows + 2 * kv_rows, (q, k_in_qkv, v_in_qkv)),
    }
    if layer.has_gate:  # q_proj has for each head the rows of its query, then of its gate
        column_parallel["q_proj"] = (2 * q_rows, (_rescale(q, layer.head_dim, 2 * layer.head_dim),))
    for name in [name for name in shapes if name.startswith(f"{layer.module}.")]:
        shape, (module, leaf) = shapes[name], name.removeprefix(f"{layer.module}.").rpartition(".")[::2]
        if module in column_parallel and shape[0] == column_parallel[module][0]:
            plan.slices[name] = TensorSlice(0, column_parallel[module][1])
        elif module == "o_proj" and (leaf == "bias" or shape[-1] == out_columns):
            plan.roles[f"{layer.module}.o_proj"] = ParallelRole.ROW
            if leaf == "weight":
                plan.slices[name] = TensorSlice(1, (out,))
        elif module in ("q_norm", "k_norm") and shape == (layer.head_dim,):
            continue  # a norm over one head is the same on every rank
        elif module in ("q_norm", "k_norm") and shape == ((q_rows,) if module == "q_norm" else (kv_rows,)):
            plan.slices[name] = TensorSlice(0, (q if module == "q_norm" else kv,))
            plan.roles[f"{layer.module}.{module}"] = ParallelRole.QK_NORM
        elif name == f"{layer.module}.sinks" and shape == (layer.num_heads,):
            plan.slices[name] = TensorSlice(0, (_rescale(q, layer.head_dim, 1),))
        else:
            raise InvalidModel(f"{name} {list(shape)} is not a tensor that we can split by heads; serve it with tp 1")


def _shard_latent_attention(
    plan: ShardingPlan, shapes: dict[str, Shape], layer: AttentionLayer, shard: TpShard
) -> None:
    """Split one latent attention module by heads. Every rank holds the projections to latents and their norms."""
    shard.split_evenly(layer.num_heads, "the attention heads")
    for module, dim in (("q_proj", 0), ("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
        name = f"{layer.module}.{module}.weight"
        if name in shapes:
            plan.slices[name] = TensorSlice(dim, (shard.split_evenly(shapes[name][dim], name),))
    plan.roles[f"{layer.module}.o_proj"] = ParallelRole.ROW


def _shard_delta_net(
    plan: ShardingPlan, shapes: dict[str, Shape], module: str, layer: DeltaNetSpec, shard: TpShard
) -> None:
    """Split one gated delta net by key heads, each with the value heads that it serves. Raises InvalidModel for unknown
    tensors."""
    first, last = shard.split_evenly(layer.key_heads, "the key heads of linear attention")
    group = layer.value_heads // layer.key_heads
    keys, values = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim

    def part(size: int, start: int = 0) -> Range:
        """This rank's rows of a tensor with `size` rows for each key head, from row `start` on."""
        return start + first * size, start + last * size

    k, v = layer.key_dim, group * layer.value_dim
    channels = (part(k), part(k, keys), part(v, 2 * keys))
    ranges: dict[str, tuple[int, int, tuple[Range, ...]]] = {  # (dimension, its size, this rank's part)
        "in_proj_qkv.weight": (0, 2 * keys + values, channels),
        "in_proj_z.weight": (0, values, (part(v),)),
        "in_proj_qkvz.weight": (0, 2 * keys + 2 * values, (part(2 * k + 2 * v),)),
        "in_proj_ba.weight": (0, 2 * layer.value_heads, (part(2 * group),)),
        "conv1d.weight": (0, 2 * keys + values, channels),
        **dict.fromkeys(("q_proj.weight", "k_proj.weight"), (0, keys, (part(k),))),
        **dict.fromkeys(("v_proj.weight", "g_proj.weight", "g_b_proj.weight"), (0, values, (part(v),))),
        **dict.fromkeys(("out_proj.weight", "o_proj.weight"), (1, values, (part(v),))),
        **dict.fromkeys(
            (f"{name}.weight" for name in ("in_proj_a", "in_proj_b", "a_proj", "b_proj")),
            (0, layer.value_heads, (part(group),)),
        ),
        **dict.fromkeys(("A_log", "dt_bias"), (0, layer.value_heads, (part(group),))),
        "forget_gate.A_log": (2, layer.value_heads, (part(group),)),
        **dict.fromkeys(("forget_gate.f_b_proj.weight", "forget_gate.dt_bias"), (0, keys, (part(k),))),
    }
    # Every rank has the bottlenecks of gates and decays, and the norm over one head.
    whole = {"g_a_proj.weight", "forget_gate.f_a_proj.weight"}
    for name in [name for name in shapes if name.startswith(f"{module}.")]:
        leaf, shape = name.removeprefix(f"{module}."), shapes[name]
        if leaf in ranges and shape[ranges[leaf][0]] == ranges[leaf][1]:
            plan.slices[name] = TensorSlice(ranges[leaf][0], ranges[leaf][2])
        elif leaf not in whole and (leaf not in ("norm.weight", "o_norm.weight") or shape != (layer.value_dim,)):
            raise InvalidModel(f"{name} {list(shape)} is not a tensor that we can split by heads; serve it with tp 1")
    output = "o_proj" if f"{module}.o_proj.weight" in shapes else "out_proj"
    plan.roles[f"{module}.{output}"] = ParallelRole.ROW


def _shard_mamba(plan: ShardingPlan, shapes: dict[str, Shape], module: str, layer: MambaSpec, shard: TpShard) -> None:
    """Split one Mamba mixer by channels. Every rank has all of dt, B and C before the projection of dt, so x_proj sums
    over the ranks, and so does out_proj."""
    rows = shard.split_evenly(layer.channels, "the channels of the Mamba mixers")
    both = (rows, _shift(rows, layer.channels))  # x and the gate
    ranges: dict[str, tuple[int, tuple[Range, ...]]] = {  # (dimension, this rank's part)
        **dict.fromkeys(("in_proj.weight", "in_proj.bias"), (0, both)),
        **dict.fromkeys(("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D"), (0, (rows,))),
        **dict.fromkeys(("x_proj.weight", "out_proj.weight"), (1, (rows,))),
    }
    for leaf, (dim, parts) in ranges.items():
        if (name := f"{module}.{leaf}") in shapes:
            plan.slices[name] = TensorSlice(dim, parts)
    for leaf in ("x_proj", "out_proj"):
        plan.roles[f"{module}.{leaf}"] = ParallelRole.ROW


def _shard_lightning(plan: ShardingPlan, module: str, layer: LightningSpec, shard: TpShard) -> None:
    """Split lightning attention by heads. Its norm is over the heads of all ranks."""
    start, stop = shard.split_evenly(layer.heads, "the heads of lightning attention")
    rows = start * layer.head_dim, stop * layer.head_dim
    plan.slices[f"{module}.qkv_proj.weight"] = TensorSlice(0, ((3 * rows[0], 3 * rows[1]),))
    for leaf, dim in (("output_gate", 0), ("norm", 0), ("out_proj", 1)):
        plan.slices[f"{module}.{leaf}.weight"] = TensorSlice(dim, (rows,))
    plan.roles[f"{module}.norm"] = ParallelRole.QK_NORM
    plan.roles[f"{module}.out_proj"] = ParallelRole.ROW


def _rescale(rows: Range, head_dim: int, size: int) -> Range:
    """The rows of the same heads in a tensor with `size` rows a head."""
    return rows[0] // head_dim * size, rows[1] // head_dim * size


def _shift(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def _shard_by_style(plan: ShardingPlan, shapes: dict[str, Shape], name: str, style: str, shard: TpShard) -> None:
    """Split the parameter or module `name` as transformers' `style` says."""
    tensors = [name] if name in shapes else [t for leaf in ("weight", "bias") if (t := f"{name}.{leaf}") in shapes]
    # Gate and up in one tensor: each half is split. phi3's code halves the output, so transformers gathers the whole
    # output first. If each half is split on its own, no gather is needed.
    is_packed = style.startswith("packed") or name.endswith("gate_up_proj")
    if style.startswith("replicated"):
        return
    if style == "moe_tp_experts":
        plan.roles[name] = ParallelRole.EXPERTS
    elif style in ("colwise", "packed_colwise") or (style == "colwise_gather_output" and is_packed):
        for tensor in tensors:
            shape = shapes[tensor]
            dim = len(shape) - 1 if _is_bias(tensor) else max(0, len(shape) - 2)
            pieces = 2 if is_packed else 1
            step = shape[dim] // pieces
            rows = shard.split_evenly(step, f"the rows of {tensor}")
            plan.slices[tensor] = TensorSlice(dim, tuple(_shift(rows, i * step) for i in range(pieces)))
    elif style in ("pairs_of_columns", "rows_of_experts"):
        shape = shapes[name]
        dim, step = (len(shape) - 1, 2) if style == "pairs_of_columns" else (1, 1)
        start, stop = shard.split_evenly(shape[dim] // step, f"the experts' intermediate size in {name}")
        plan.slices[name] = TensorSlice(dim, ((start * step, stop * step),))
    elif style in ("rowwise", "rowwise_split_input"):
        for tensor in tensors:
            if not _is_bias(tensor):
                dim = len(shapes[tensor]) - 1
                columns = shard.split_evenly(shapes[tensor][dim], f"the columns of {tensor}")
                plan.slices[tensor] = TensorSlice(dim, (columns,))
            elif name in shapes:
                raise InvalidModel(f"{tensor}: an expert bias cannot be split over ranks; serve it with tp 1")
        if name not in shapes:
            plan.roles[name] = ParallelRole.ROW
    else:
        raise InvalidModel(
            f"{name} has the tensor-parallel style {style!r}, which is not supported; serve it with tp 1"
        )


def _is_bias(tensor: str) -> bool:
    return tensor.endswith(("bias", "_bias"))
