"""plan_weights(): which tensor of transformers' checkpoint is made of which tensors of a GGUF file, and in which form.

A weight stays quantised if it belongs to a linear and its type has a form in block_codes.py. All others, such as
embeddings, are dequantised to the model's dtype. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.block_codes import FORMS, PLAIN, Array, CodeForm, can_dequantise
from coatcheck.workers.gguf.families import MERGED, ROPE_TENSORS, Change, GgufFamily, LayerTensors
from coatcheck.workers.gguf.gguf_file import GgufFile, GgufTensor
from coatcheck.workers.gguf.row_orders import Joined, alternate_rows

# By torch's names: those of safetensors.
DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_IN_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_UNUSED: Final = "attn_rot_embd.weight"  # a table that old files of llama have


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight `name` of `shape`, as a transformers checkpoint has it.

    `sources`: the GGUF tensor, or several with as many columns. `rows`: which rows of the sources, one source after the
    other, in order; None: all rows of the only source. `columns`: which columns, likewise. `form`: of its codes; None:
    it is stored in `dtype`, by safetensors' name. `change`: a function of its values in float32. `is_transposed`: the
    last two sizes are exchanged. `are_blocks`: MXFP4 experts in gpt-oss' own layout. `are_latent_heads`: see
    join_latent_heads.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    dtype: str
    form: CodeForm | None = None
    rows: Array | None = None
    columns: Array | None = None
    change: Change | None = None
    is_transposed: bool = False
    are_blocks: bool = False
    are_latent_heads: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the sources that are used."""
        return self.sources[0].rows if self.rows is None else len(self.rows)


def choose_dtype(file: GgufFile) -> str:
    """The model's dtype, by torch's name: that of the matrices if none is quantised, else bfloat16."""
    sizes: dict[Type, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    if not sizes or not sizes.keys() <= PLAIN.keys():
        return "bfloat16"
    largest = PLAIN[max(sizes, key=lambda kind: sizes[kind])]
    return next(name for name, stored in DTYPES.items() if stored == largest)


def plan_weights(file: GgufFile, family: GgufFamily, dtype: str) -> list[Weight]:
    """Every weight of the converted checkpoint. `dtype`: torch's name, for weights that are dequantised. Raises
    InvalidModel for a tensor that the family does not have, or of a type that cannot be dequantised."""
    _check_complete(file, family)
    planner = _Planner(file, family, DTYPES[dtype], _common_forms(file))
    kinds = family.kinds(file) if family.kinds else []
    weights = [
        weight
        for tensor in file.tensors.values()
        if tensor.name not in ROPE_TENSORS and not _is_unused(file, family, kinds, tensor.name)
        for weight in planner.plan_weights(tensor)
    ]
    names = [weight.name for weight in weights]
    if len(set(names)) != len(names):
        raise InvalidModel(f"{file.path} has two tensors for one weight; fetch it again")
    return weights


def _is_unused(file: GgufFile, family: GgufFamily, kinds: Sequence[str], name: str) -> bool:
    """Whether the tensor `name` is left out: it is listed as unused, or in a layer that predicts further tokens.
    `kinds`: the kind of each layer."""
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        return False
    layer, inner = int(found[1]), found[2]
    if file.num_layers <= layer < file.count("block_count"):
        return True
    is_listed = layer < len(kinds) and inner in family.kind_tensors[kinds[layer]].unused
    return is_listed or inner == _UNUSED


def _check_complete(file: GgufFile, family: GgufFamily) -> None:
    """Raise InvalidModel if a tensor is missing that other layers have, or that a layer of its kind must have."""
    for name in family.names:
        if not name.startswith(("blk.", "per_layer_")) and name != "output":
            file.tensor(f"{name}.weight")
    layers: list[set[str]] = [set() for _ in range(file.num_layers)]
    for name in file.tensors:
        if (found := _IN_LAYER.fullmatch(name)) and int(found[1]) < len(layers):
            layers[int(found[1])].add(found[2])
    kinds = family.kinds(file) if family.kinds else [""] * len(layers)
    for index, (names, kind) in enumerate(zip(layers, kinds, strict=True)):
        own = family.kind_tensors.get(kind, LayerTensors(frozenset()))
        others = {name for one in family.kind_tensors.values() for name in one.required | one.optional}
        needed = set().union(*layers) - (others - own.required - own.optional) | own.required
        if lost := needed - names:
            file.tensor(f"blk.{index}.{min(lost)}")


def _common_forms(file: GgufFile) -> dict[str, CodeForm]:
    """{tensor: the form in which it is written}. Weights that a rank merges get a common form."""
    forms = {tensor.name: FORMS[tensor.type] for tensor in file.tensors.values() if tensor.type in FORMS}
    for layer in range(file.num_layers):
        for group in MERGED:
            names = [name for part in group if (name := f"{part.format(layer)}.weight") in forms]
            common: CodeForm | None = reduce(
                lambda one, name: one and one.common(forms[name]), names[1:], forms[names[0]] if names else None
            )
            if common is not None:
                forms |= dict.fromkeys(names, common)
    return forms


@dataclass(frozen=True, slots=True)
class _Planner:
    """`dtype`: safetensors' name. `forms`: see _common_forms."""

    file: GgufFile
    family: GgufFamily
    dtype: str
    forms: Mapping[str, CodeForm]

    def plan_weights(self, tensor: GgufTensor) -> Iterator[Weight]:
        """The weights of the checkpoint that are made from a tensor."""
        leaf, name = self._rename(tensor.name)
        if not can_dequantise(tensor.type):
            raise InvalidModel(
                f"{self.file.path}: tensor {tensor.name} has the type {tensor.type.name}, which is not read; use a "
                "file of another type"
            )
        if self.family.model_type == "gpt_oss" and "_exps." in tensor.name:
            yield from self._gpt_oss_experts(tensor, name)
        elif leaf in ("attn_k_b", "attn_v_b"):
            yield from self._latent_heads(tensor, name)
        elif (joined := self.family.joined_with(leaf)) is not None:
            yield from self._joined(tensor, leaf, name, joined)
        elif "{}" in name:
            if len(tensor.shape) != 3:
                raise InvalidModel(
                    f"{self.file.path}: tensor {tensor.name} has shape {list(tensor.shape)}, not experts"
                )
            experts, rows, _ = tensor.shape
            for expert in range(experts):
                indices = np.arange(expert * rows, (expert + 1) * rows)
                yield self._weight(name.format(expert), tensor, leaf, shape=tensor.shape[1:], rows=indices)
        elif leaf in self.family.orders:
            column = tensor if len(tensor.shape) > 1 else replace(tensor, shape=(*tensor.shape, 1))
            order = self.family.orders[leaf](self.file, column.rows)
            yield self._weight(name, column, leaf, shape=_shape(name, leaf, tensor), rows=order)
        else:
            yield self._weight(name, tensor, leaf, shape=_shape(name, leaf, tensor))

    def _rename(self, name: str) -> tuple[str, str]:
        """(name in the layer without .weight and .bias, transformers' name)."""
        found = _IN_LAYER.fullmatch(name)
        layer, inner = (int(found[1]), found[2]) if found else (-1, name)
        leaf, dot, ending = inner.rpartition(".") if "." in inner else (inner, "", "")
        prefix = "blk.{}." if found else ""
        template = self.family.names.get(prefix + inner)
        if template is None and ending in ("weight", "bias") and (known := self.family.names.get(prefix + leaf)):
            template = f"{known}{dot}{ending}"
        if template is None or layer >= self.file.num_layers:
            raise InvalidModel(
                f"{self.file.path} has tensor {name}, which {self.file.architecture} models of this size do not have "
                "here; serve the model's safetensors checkpoint instead"
            )
        return leaf, template.replace("{}", str(layer), 1) if found else template

    def _weight(
        self, name: str, tensor: GgufTensor, leaf: str, *, shape: tuple[int, ...], rows: Array | None = None
    ) -> Weight:
        is_linear = name.endswith(".weight") and len(shape) == 2 and leaf not in self.family.plain
        form = self.forms.get(tensor.name) if is_linear else None
        columns = self.family.column_orders[leaf](self.file, shape[-1]) if leaf in self.family.column_orders else None
        if form is not None and columns is not None and not keeps_groups(columns, form.group):
            form = None
        found = _IN_LAYER.fullmatch(tensor.name)
        change = self.family.changes.get(found[2] if found else tensor.name)
        is_transposed = leaf in self.family.transposed and len(shape) == 2
        return Weight(
            name,
            shape[::-1] if is_transposed else shape,
            (tensor,),
            "F32" if change else PLAIN.get(tensor.type, self.dtype),
            form=form,
            rows=rows,
            columns=columns,
            change=change,
            is_transposed=is_transposed,
        )

    def _joined(self, tensor: GgufTensor, leaf: str, name: str, joined: Joined) -> Iterator[Weight]:
        """The weight that is made of several tensors, where the first of them is placed."""
        first, *_ = joined.leaves
        sources = tuple(self.file.tensor(tensor.name.replace(f".{leaf}.", f".{part}.")) for part in joined.leaves)
        if leaf != first or not all(can_dequantise(source.type) for source in sources):
            return  # placed with its first part, or refused when the other is placed
        if len({(source.shape[:-2], source.columns) for source in sources}) > 1:
            shapes = ", ".join(f"{source.name} {list(source.shape)}" for source in sources)
            raise InvalidModel(f"{self.file.path}: tensors do not fit together: {shapes}; fetch it again")
        shape = (*tensor.shape[:-2], sum(source.shape[-2] for source in sources), tensor.columns)
        rows = joined.order(self.file, sum(source.rows for source in sources))
        forms = {self.forms.get(source.name) for source in sources}
        is_linear = len(shape) == 2 and len(forms) == 1
        plain = {PLAIN.get(source.type, self.dtype) for source in sources}
        dtype = plain.pop() if len(plain) == 1 else self.dtype
        yield Weight(name, shape, sources, dtype, form=forms.pop() if is_linear else None, rows=rows)

    def _latent_heads(self, tensor: GgufTensor, name: str) -> Iterator[Weight]:
        """Newer files have kv_b_proj of latent attention as two tensors: keys, as [heads, latent, columns of a key],
        and values, as [heads, columns of a value, latent]."""
        if "attn_v_b" in tensor.name:
            self.file.tensor(tensor.name.replace("attn_v_b", "attn_k_b"))
            return  # placed with its keys
        values = self.file.tensor(tensor.name.replace("attn_k_b", "attn_v_b"))
        if not can_dequantise(values.type):
            return  # refused when it is placed
        if len(tensor.shape) != 3 or len(values.shape) != 3 or tensor.shape[:2] != (values.shape[0], values.columns):
            raise InvalidModel(
                f"{self.file.path}: tensors {tensor.name} and {values.name} have shapes {list(tensor.shape)} and "
                f"{list(values.shape)}, which do not fit together; fetch it again"
            )
        heads, latent, key = tensor.shape
        shape = (heads * (key + values.shape[1]), latent)
        yield Weight(name, shape, (tensor, values), self.dtype, are_latent_heads=True)

    def _gpt_oss_experts(self, tensor: GgufTensor, name: str) -> Iterator[Weight]:
        """gpt-oss stores all experts in one tensor, with alternating rows of gate and up; unquantised experts as
        [in, out]. `name`: ends with .weight or .bias."""
        if "ffn_up_exps" in tensor.name:
            return  # placed with its gate
        sources: tuple[GgufTensor, ...] = (tensor,)
        if "ffn_gate_exps" in tensor.name:
            sources = (tensor, self.file.tensor(tensor.name.replace("ffn_gate_exps", "ffn_up_exps")))
        experts, size = tensor.shape[0], tensor.shape[1] * len(sources)
        rows = alternate_rows(self.file, experts * size) if len(sources) > 1 else None
        name, _, ending = name.rpartition(".")
        if ending == "bias":
            columns = tuple(replace(source, shape=(*source.shape, 1)) for source in sources)
            yield Weight(f"{name}_bias", (experts, size), columns, PLAIN.get(tensor.type, self.dtype), rows=rows)
        elif all(source.type is Type.MXFP4 for source in sources):
            shape = (experts, size, tensor.columns)
            yield Weight(name, shape, sources, self.dtype, form=FORMS[Type.MXFP4], rows=rows, are_blocks=True)
        else:
            yield Weight(name, (experts, tensor.columns, size), sources, self.dtype, rows=rows, is_transposed=True)


def keeps_groups(order: Array, group: int) -> bool:
    """Whether an order of columns moves whole groups of columns, which have a common scale."""
    if len(order) % group:
        return False
    groups = order.reshape(-1, group)
    return bool((groups[:, 0] % group == 0).all() and (groups == groups[:, :1] + np.arange(group)).all())


def _shape(name: str, leaf: str, tensor: GgufTensor) -> tuple[int, ...]:
    """GGUF leaves out sizes of 1."""
    if leaf == "ffn_gate_inp_shexp":
        return (1, tensor.columns)
    if name.endswith("moe_statics.e_score_correction_bias"):
        return (1, tensor.columns)
    if leaf == "ssm_norm" or (leaf in ("ssm_a", "ssm_d") and tensor.columns == 1):  # of each head, or group
        return (tensor.rows * tensor.columns,)
    if leaf in ("shortconv.conv", "ssm_conv1d") and len(tensor.shape) == 2:
        return (tensor.shape[0], 1, tensor.shape[1])
    return tensor.shape
