"""The sharding plan: which part of every parameter a rank holds, and which modules must speak to the other ranks.

From the model's own `tp_plan` and from what its attention layers ask for. Attention is always cut by whole heads, also
where transformers gathers instead (phi3's fused QKV, olmo2's norm over all heads). Pure: names and shapes in, cuts and
roles out.
"""

import re
from dataclasses import dataclass, field
from enum import Enum

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.distributed.tp_shard import TpShard

Shape = tuple[int, ...]


class Role(Enum):
    """How a module's output becomes the whole group's. A column-parallel linear needs nothing."""

    ROW = "its partial sums are added over ranks"
    EXPERTS = "like ROW, for a module that is no linear"
    EMBEDDING = "rows of other ranks count as zero, then added"
    HEAD = "its logits are gathered"
    HEADS_NORM = "its mean square is taken over all ranks' heads"


@dataclass(slots=True)
class ShardingPlan:
    """`cuts` by parameter name (absent: whole), `roles` by module name (absent: none)."""

    cuts: dict[str, TensorSlice] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)


def plan_sharding(
    shapes: dict[str, Shape],
    tp_plan: dict[str, str],
    calls: list[AttentionLayer],
    embedding: str,
    head: str,
    shard: TpShard,
) -> ShardingPlan:
    """`shapes` of all parameters as the checkpoint has them; `embedding` and `head` name those modules.

    Raises InvalidConfig where `size` does not divide what must be divided, InvalidModel where the plan is not ours.
    """
    plan = ShardingPlan()
    if shard.size == 1:
        return plan
    if not tp_plan:
        raise InvalidModel("this architecture has no tensor-parallel plan; serve it with tp 1")
    for module, role in ((embedding, Role.EMBEDDING), (head, Role.HEAD)):
        plan.roles[module] = role
        for leaf in ("weight", "bias"):
            if (name := f"{module}.{leaf}") in shapes:
                plan.cuts[name] = TensorSlice(0, (shard.vocabulary(shapes[name][0]),))
    attention = {call.module: call for call in calls}
    for call in calls:
        _cut_attention(plan, shapes, call, shard)
    styles = [(re.compile(re.escape(k).replace(r"\*", r"\d+")), style) for k, style in tp_plan.items()]
    # An entry names a parameter (experts), or a module, of which weight and bias follow.
    for name in sorted({*shapes, *(k.rpartition(".")[0] for k in shapes), *(_grandparents(shapes))}):
        style = next((style for pattern, style in styles if pattern.fullmatch(name)), None)
        if style is None or name in plan.roles or name.rpartition(".")[0] in attention:
            continue
        _cut_by_style(plan, shapes, name, style, shard)
    return plan


def _grandparents(shapes: dict[str, Shape]) -> set[str]:
    return {name.rpartition(".")[0].rpartition(".")[0] for name in shapes} - {""}


def _cut_attention(plan: ShardingPlan, shapes: dict[str, Shape], call: AttentionLayer, shard: TpShard) -> None:
    """By whole heads. What it does not know it refuses: a wrong guess would serve nonsense."""
    q, kv = shard.query_heads(call), shard.kv_heads(call)
    q_rows, kv_rows = call.num_heads * call.head_dim, call.num_kv_heads * call.head_dim
    fused = (q, *((start + q_rows + i * kv_rows, stop + q_rows + i * kv_rows) for i in (0, 1) for start, stop in (kv,)))
    column = {
        "q_proj": (q_rows, (q,)),
        "k_proj": (kv_rows, (kv,)),
        "v_proj": (kv_rows, (kv,)),
        "qkv_proj": (q_rows + 2 * kv_rows, fused),
    }
    for name in [name for name in shapes if name.startswith(f"{call.module}.")]:
        shape, (module, leaf) = shapes[name], name.removeprefix(f"{call.module}.").rpartition(".")[::2]
        if module in column and shape[0] == column[module][0]:
            plan.cuts[name] = TensorSlice(0, column[module][1])
        elif module == "o_proj" and (leaf == "bias" or shape[-1] == q_rows):
            plan.roles[f"{call.module}.o_proj"] = Role.ROW
            if leaf == "weight":
                plan.cuts[name] = TensorSlice(1, (q,))
        elif module in ("q_norm", "k_norm") and shape == (call.head_dim,):
            continue  # one head's norm, the same on every rank
        elif module in ("q_norm", "k_norm") and shape == ((q_rows,) if module == "q_norm" else (kv_rows,)):
            plan.cuts[name] = TensorSlice(0, (q if module == "q_norm" else kv,))
            plan.roles[f"{call.module}.{module}"] = Role.HEADS_NORM
        elif name == f"{call.module}.sinks" and shape == (call.num_heads,):
            plan.cuts[name] = TensorSlice(0, ((q[0] // call.head_dim, q[1] // call.head_dim),))
        else:
            raise InvalidModel(f"{name} {list(shape)} is not a tensor that we can split by heads; serve it with tp 1")


def _cut_by_style(plan: ShardingPlan, shapes: dict[str, Shape], name: str, style: str, shard: TpShard) -> None:
    tensors = [name] if name in shapes else [t for leaf in ("weight", "bias") if (t := f"{name}.{leaf}") in shapes]
    # phi3 marks these to be gathered because its halves are chunked apart; cut as halves they need not be.
    packed = style.startswith("packed") or name.endswith("gate_up_proj")
    if style.startswith("replicated"):
        return
    if style == "moe_tp_experts":
        plan.roles[name] = Role.EXPERTS
    elif style in ("colwise", "packed_colwise") or (style == "colwise_gather_output" and packed):
        for tensor in tensors:
            shape = shapes[tensor]
            dim = max(0, len(shape) - 2) if not tensor.endswith(("bias", "_bias")) else len(shape) - 1
            pieces = 2 if packed else 1
            start, stop = shard.even(shape[dim] // pieces, f"the rows of {tensor}")
            step = shape[dim] // pieces
            plan.cuts[tensor] = TensorSlice(dim, tuple((start + i * step, stop + i * step) for i in range(pieces)))
    elif style in ("rowwise", "rowwise_split_input"):
        for tensor in tensors:
            if not tensor.endswith(("bias", "_bias")):
                dim = len(shapes[tensor]) - 1
                plan.cuts[tensor] = TensorSlice(dim, (shard.even(shapes[tensor][dim], f"the columns of {tensor}"),))
            elif name in shapes:
                raise InvalidModel(f"{tensor}: an expert bias cannot be split over ranks; serve it with tp 1")
        if name not in shapes:
            plan.roles[name] = Role.ROW
    else:
        raise InvalidModel(f"{name} is split as {style!r}, which we do not know; serve it with tp 1")
