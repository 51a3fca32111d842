"""read_quantised(): the quantised weights of a checkpoint, found in the headers of its files.

For each method a function recognises the stored tensors by their names, checks that their shapes fit together, and
describes the weight. It reads no tensors except small ones with a weight's shape or quantisation state. This module
imports no torch.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.quantisation_scheme import Method, QuantisationScheme, read_scheme
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry
from coatcheck.workers.checkpoint.stored_weight import Axis, Encoding, StoredPart, StoredWeight

Entries = Mapping[str, TensorEntry]
Found = tuple[str, StoredWeight]

# Static scales of activations and of the KV cache. They are not used: quantised activations get scales in each step.
_UNUSED: Final = (
    "input_scale", "input_global_scale", "output_scale", "input_zero_point", "activation_scale", "q_scale", "k_scale",
    "v_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantisedTensors:
    """`weights`: by the name that the unquantised weight would have. `others`: names of their other stored tensors, and
    of tensors that are not used."""

    weights: Mapping[str, StoredWeight]
    others: frozenset[str]


def read_quantised(name: str, config: Mapping[str, Any], entries: Entries) -> QuantisedTensors:
    """The quantised weights of a checkpoint; none if its config.json has no quantization_config. `name`: of the model,
    for errors. Raises InvalidModel for a method that is not served, and for stored tensors that are missing or do not
    fit together."""
    scheme = read_scheme(name, config)
    if scheme is None:
        return QuantisedTensors({}, frozenset())
    layout = _Layout(name, scheme, entries)
    weights = dict(_FINDERS[scheme.method](layout))
    if not weights:
        raise InvalidModel(
            f"{name}: config.json says that it is quantised with {scheme.method.value}, but no tensor is; fetch the "
            "checkpoint again"
        )
    others = {part.key for weight in weights.values() for part in weight.parts.values()}
    others |= {key for key in entries if key.rpartition(".")[2] in _UNUSED}
    for weight_name in weights:
        module = weight_name.removesuffix(".weight")
        others |= {
            f"{module}.{leaf}" for leaf in ("weight_shape", "g_idx", "weight_g_idx") if f"{module}.{leaf}" in entries
        }
        others |= {key for key in entries if key.startswith(f"{weight_name}.quant_state.")}
    return QuantisedTensors(weights, frozenset(others - weights.keys()))


def plain_entries(entries: Entries, quantised: QuantisedTensors) -> dict[str, TensorEntry]:
    """The entries that an unquantised checkpoint would have. `start` and `end` of a quantised weight are those of its
    codes."""
    plain = {key: entry for key, entry in entries.items() if key not in quantised.others}
    dtypes = [entry.dtype for key, entry in plain.items() if entry.dtype in _FLOATS and key not in quantised.weights]
    # Norms and embeddings, which are never quantised, have the dtype in which the model was trained.
    dtype = max(dtypes, key=dtypes.count, default="BF16")
    for name, weight in quantised.weights.items():
        codes = entries[weight.parts["codes"].key]
        plain[name] = TensorEntry(codes.file, dtype, weight.shape, codes.start, codes.end)
    return plain


@dataclass(frozen=True, slots=True)
class _Layout:
    """The stored tensors of a checkpoint, with checks that raise InvalidModel. `name`: of the model, for errors."""

    name: str
    scheme: QuantisationScheme
    entries: Entries

    def modules(self, leaf: str) -> Iterator[str]:
        """The modules with a stored tensor `leaf`."""
        ending = f".{leaf}"
        return (key.removesuffix(ending) for key in self.entries if key.endswith(ending))

    def entry(self, key: str, dtypes: tuple[str, ...]) -> TensorEntry:
        entry = self.entries.get(key)
        if entry is None:
            raise InvalidModel(f"{self.name}: the checkpoint lacks {key}; fetch it again, or fix its index")
        if entry.dtype not in dtypes:
            raise InvalidModel(f"{self.name}: tensor {key} is stored as {entry.dtype}, not as {' or '.join(dtypes)}")
        return entry

    def matrix_shape(self, key: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        shape = self.entry(key, dtypes).shape
        if len(shape) != 2:
            raise InvalidModel(f"{self.name}: tensor {key} has shape {list(shape)}; it should be a matrix")
        return shape[0], shape[1]

    def check_shape(self, key: str, wanted: tuple[int, ...]) -> None:
        if (shape := self.entries[key].shape) != wanted:
            raise InvalidModel(
                f"{self.name}: tensor {key} has shape {list(shape)}, its weight implies {list(wanted)}: the checkpoint "
                "and its quantization_config do not belong together; fetch both again"
            )

    def group(self, module: str, columns: int) -> int:
        size = columns if self.scheme.group_size == -1 else self.scheme.group_size
        if size < 1 or columns % size:
            raise InvalidModel(
                f"{self.name}: groups of {size} do not divide the {columns} columns of {module}; fetch config.json "
                "again"
            )
        return size


_FLOATS: Final = ("F32", "BF16", "F16")
_E8M0: Final = "U8"  # exponents of two, as the scales of MXFP4 and MXFP8 are stored
_FLOAT4_GROUPS: Final = {"F8_E4M3": 16, _E8M0: 32}  # columns that share a scale, by its dtype: NVFP4, MXFP4


def _scales(
    layout: _Layout, key: str, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[StoredPart, tuple[int, int]]:
    """(the scales, (rows, columns) that share one). The stored scales are [row blocks, column blocks], [rows], or one
    number. `key`: of the stored scales. `shape`: of the weight. `block`: as in QuantisationScheme."""
    entry = layout.entry(key, (*_FLOATS, _E8M0))
    rows, columns = shape
    if len(entry.shape) < 2:
        if entry.shape in ((), (1,)):
            return StoredPart(key), (rows, columns)
        layout.check_shape(key, (rows,))
        return StoredPart(key, rows=Axis(0)), (1, columns)
    if entry.shape == (rows, 1):
        return StoredPart(key, rows=Axis(0)), (1, columns)
    if entry.shape == (1, 1):
        return StoredPart(key), (rows, columns)
    if len(entry.shape) == 2 and entry.shape[0] == rows and entry.shape[1] and columns % entry.shape[1] == 0:
        group = columns // entry.shape[1]
        return StoredPart(key, Axis(0), Axis(1, group)), (1, group)
    layout.check_shape(key, (-(-rows // block[0]), -(-columns // block[1])))
    return StoredPart(key, Axis(0, block[0]), Axis(1, block[1])), block


def _find_compressed(layout: _Layout) -> Iterator[Found]:
    for module in layout.modules("weight_packed"):
        if layout.entries[f"{module}.weight_packed"].dtype == "U8":
            factor = ("scale_divisor", "weight_global_scale")
            yield f"{module}.weight", _float4_weight(layout, module, "weight_packed", factor)
        else:
            yield f"{module}.weight", _packed_weight(layout, module)
    for module in layout.modules("weight_scale"):
        if f"{module}.weight" in layout.entries:
            yield f"{module}.weight", _plain_weight(layout, module, "weight_scale", ("I8", "F8_E4M3"))


def _packed_weight(layout: _Layout, module: str) -> StoredWeight:
    rows, packed = layout.matrix_shape(f"{module}.weight_packed", ("I32",))
    if layout.scheme.method is Method.GGUF:
        columns = 8 * packed
    else:
        rows, columns = _stored_shape(layout, f"{module}.weight_shape")
    bits = 32 * packed // columns if columns else 0
    if bits not in (2, 4, 8):
        raise InvalidModel(f"{layout.name}: {module} has {bits} bits a weight; 2, 4 and 8 are served")
    fields = 32 // bits
    layout.check_shape(f"{module}.weight_packed", (rows, -(-columns // fields)))
    scales, block = _scales(layout, f"{module}.weight_scale", (rows, columns), layout.scheme.block)
    parts = {"codes": StoredPart(f"{module}.weight_packed", Axis(0), Axis(1, fields)), "scales": scales}
    if (key := f"{module}.weight_g_idx") in layout.entries:
        layout.entry(key, ("I32", "I64"))
        layout.check_shape(key, (columns,))
        parts["order"] = StoredPart(key, columns=Axis(0))
        parts["scales"] = StoredPart(scales.key, scales.rows)  # all columns: a slice may have columns of any group
        block = (1, 1)
    if (key := f"{module}.weight_zero_point") in layout.entries:
        if layout.scheme.method is Method.GGUF:
            parts["zeros"] = _plain_zeros(layout, key, scales, ("F32",))
        else:
            layout.entry(key, ("I32",))
            layout.check_shape(key, (-(-rows // fields), layout.entries[scales.key].shape[-1]))
            parts["zeros"] = StoredPart(key, Axis(0, fields), parts["scales"].columns)
    return StoredWeight((rows, columns), Encoding.PACKED_INT, parts, bits, block)


def _plain_zeros(layout: _Layout, key: str, scales: StoredPart, dtypes: tuple[str, ...]) -> StoredPart:
    """Zero points that are stored as the scales are, one in each element."""
    layout.entry(key, dtypes)
    layout.check_shape(key, layout.entries[scales.key].shape)
    return StoredPart(key, scales.rows, scales.columns)


def _float4_weight(layout: _Layout, module: str, leaf: str, factor: tuple[str, str]) -> StoredWeight:
    """NVFP4 has scales in e4m3, and one float32 number that multiplies them (role scale_factor) or divides them
    (scale_divisor). MXFP4 has scales in E8M0. `leaf`: of the codes. `factor`: role and leaf of NVFP4's number."""
    rows, packed = layout.matrix_shape(f"{module}.{leaf}", ("U8",))
    key, columns = f"{module}.weight_scale", 2 * packed
    group = _FLOAT4_GROUPS[layout.entry(key, tuple(_FLOAT4_GROUPS)).dtype]
    layout.check_shape(key, (rows, columns // group))
    parts = {
        "codes": StoredPart(f"{module}.{leaf}", Axis(0), Axis(1, 2)),
        "scales": StoredPart(key, Axis(0), Axis(1, group)),
    }
    if layout.entries[key].dtype != _E8M0:
        role, number = factor[0], f"{module}.{factor[1]}"
        if layout.entry(number, ("F32",)).shape != ():
            layout.check_shape(number, (1,))
        parts[role] = StoredPart(number)
    return StoredWeight((rows, columns), Encoding.FLOAT4, parts, 4, (1, group))


def _stored_shape(layout: _Layout, key: str) -> tuple[int, int]:
    entry = layout.entry(key, ("I32", "I64"))
    layout.check_shape(key, (2,))
    rows, columns = struct.unpack("<2i" if entry.dtype == "I32" else "<2q", read_bytes(entry))
    return rows, columns


def read_bytes(entry: TensorEntry) -> bytes:
    """The content of a stored tensor."""
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        return file.read(entry.end - entry.start)


def _plain_weight(layout: _Layout, module: str, scale: str, dtypes: tuple[str, ...]) -> StoredWeight:
    """A weight whose codes are one int8 or float8 for each element, in a tensor of the weight's shape."""
    rows, columns = layout.matrix_shape(f"{module}.weight", dtypes)
    scales, block = _scales(layout, f"{module}.{scale}", (rows, columns), layout.scheme.block)
    parts = {"codes": StoredPart(f"{module}.weight", Axis(0), Axis(1)), "scales": scales}
    if (key := f"{module}.weight_zero_point") in layout.entries:
        dtypes = ("F32",) if layout.scheme.method is Method.GGUF else ("I8",)
        parts["zeros"] = _plain_zeros(layout, key, scales, dtypes)
    is_integer = layout.entries[f"{module}.weight"].dtype == "I8"
    encoding, kind = (Encoding.INT8, "int") if is_integer else (Encoding.FLOAT8, "float")
    asks = kind in layout.scheme.activations and layout.entries[scales.key].dtype != _E8M0
    return StoredWeight((rows, columns), encoding, parts, 8, block, quantises_activations=asks)


def _find_fp8(layout: _Layout) -> Iterator[Found]:
    for key, entry in layout.entries.items():
        if entry.dtype == "F8_E4M3" and key.endswith(".weight"):
            module = key.removesuffix(".weight")
            scale = "weight_scale_inv" if f"{module}.weight_scale_inv" in layout.entries else "weight_scale"
            yield key, _plain_weight(layout, module, scale, ("F8_E4M3",))


def _find_modelopt(layout: _Layout) -> Iterator[Found]:
    for key, entry in layout.entries.items():
        module, _, leaf = key.rpartition(".")
        if leaf == "pre_quant_scale":
            raise InvalidModel(
                f"{layout.name}: {key} scales activations, which is not served; use a checkpoint of NVFP4 or FP8"
            )
        if leaf == "weight" and entry.dtype == "U8":
            yield key, _float4_weight(layout, module, leaf, ("scale_factor", "weight_scale_2"))
        elif leaf == "weight" and entry.dtype == "F8_E4M3":
            yield key, _plain_weight(layout, module, "weight_scale", ("F8_E4M3",))


def _find_gguf(layout: _Layout) -> Iterator[Found]:
    """The tensors of compressed-tensors, and gpt-oss' experts. Zero points are float32, and the shape of a packed
    weight is not stored."""
    yield from _find_compressed(layout)
    yield from _find_mxfp4(layout)


def _find_awq(layout: _Layout) -> Iterator[Found]:
    fields = 32 // layout.scheme.bits
    for module in layout.modules("qweight"):
        columns, packed = layout.matrix_shape(f"{module}.qweight", ("I32",))
        rows, group = packed * fields, layout.group(module, columns)
        layout.entry(f"{module}.scales", _FLOATS)
        layout.check_shape(f"{module}.scales", (columns // group, rows))
        layout.entry(f"{module}.qzeros", ("I32",))
        layout.check_shape(f"{module}.qzeros", (columns // group, packed))
        parts = {
            "codes": StoredPart(f"{module}.qweight", Axis(1, fields), Axis(0)),
            "scales": StoredPart(f"{module}.scales", Axis(1), Axis(0, group)),
            "zeros": StoredPart(f"{module}.qzeros", Axis(1, fields), Axis(0, group)),
        }
        yield f"{module}.weight", StoredWeight((rows, columns), Encoding.AWQ, parts, layout.scheme.bits, (1, group))


def _find_gptq(layout: _Layout) -> Iterator[Found]:
    bits, fields = layout.scheme.bits, 32 // layout.scheme.bits
    for module in layout.modules("qweight"):
        packed, rows = layout.matrix_shape(f"{module}.qweight", ("I32",))
        columns = packed * fields
        group = layout.group(module, columns)
        groups = columns // group
        layout.entry(f"{module}.scales", _FLOATS)
        layout.check_shape(f"{module}.scales", (groups, rows))
        layout.entry(f"{module}.qzeros", ("I32",))
        layout.check_shape(f"{module}.qzeros", (groups, -(-rows // fields)))
        ordered = f"{module}.g_idx" in layout.entries
        by_group = None if ordered else Axis(0, group)
        parts = {
            "codes": StoredPart(f"{module}.qweight", Axis(1), Axis(0, fields)),
            "scales": StoredPart(f"{module}.scales", Axis(1), by_group),
            "zeros": StoredPart(f"{module}.qzeros", Axis(1, fields), by_group),
        }
        if ordered:
            layout.entry(f"{module}.g_idx", ("I32", "I64"))
            layout.check_shape(f"{module}.g_idx", (columns,))
            parts["order"] = StoredPart(f"{module}.g_idx", columns=Axis(0))
        block = (1, 1 if ordered else group)
        offset = layout.scheme.zero_offset
        yield f"{module}.weight", StoredWeight((rows, columns), Encoding.GPTQ, parts, bits, block, offset)


def _find_mxfp4(layout: _Layout) -> Iterator[Found]:
    for key, entry in layout.entries.items():
        if not key.endswith("_blocks"):
            continue
        name = key.removesuffix("_blocks")
        layout.entry(key, ("U8",))
        if len(entry.shape) != 4 or entry.shape[3] != 16:
            raise InvalidModel(f"{layout.name}: tensor {key} has shape {list(entry.shape)}; its last size should be 16")
        experts, rows, blocks, _ = entry.shape
        layout.entry(f"{name}_scales", ("U8",))
        layout.check_shape(f"{name}_scales", (experts, rows, blocks))
        axes = (Axis(1), Axis(2, 32), Axis(0))
        parts = {"codes": StoredPart(key, *axes), "scales": StoredPart(f"{name}_scales", *axes)}
        yield name, StoredWeight((experts, blocks * 32, rows), Encoding.MXFP4, parts, 4)


def _find_nf4(layout: _Layout) -> Iterator[Found]:
    for state_key in [key for key in layout.entries if key.endswith(".quant_state.bitsandbytes__nf4")]:
        name = state_key.removesuffix(".quant_state.bitsandbytes__nf4")
        try:
            state: dict[str, Any] = json.loads(read_bytes(layout.entries[state_key]))
            rows, columns = map(int, state["shape"])
            block, offset = int(state["blocksize"]), float(state.get("nested_offset", 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidModel(f"{layout.name}: tensor {state_key} cannot be read ({error}); fetch it again") from error
        roles = {"codes": name, "scales": f"{name}.absmax", "table": f"{name}.quant_map"}
        if f"{name}.nested_absmax" in layout.entries:
            roles |= {"scale_scales": f"{name}.nested_absmax", "scale_table": f"{name}.nested_quant_map"}
        for key in roles.values():
            layout.entry(key, ("U8", *_FLOATS))
        parts = {role: StoredPart(key) for role, key in roles.items()}
        yield name, StoredWeight((rows, columns), Encoding.NF4, parts, 4, constants=(float(block), offset))


_FINDERS: Final[Mapping[Method, Callable[[_Layout], Iterator[Found]]]] = {
    Method.COMPRESSED_TENSORS: _find_compressed,
    Method.FP8: _find_fp8,
    Method.AWQ: _find_awq,
    Method.GPTQ: _find_gptq,
    Method.MXFP4: _find_mxfp4,
    Method.BITSANDBYTES: _find_nf4,
    Method.MODELOPT: _find_modelopt,
    Method.GGUF: _find_gguf,
}
