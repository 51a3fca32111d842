"""QuantisationScheme: the part of `quantization_config` in config.json that the stored tensors do not show.

It is checked before weights are read, without torch. The tensors themselves show which modules are quantised: a module
in `ignore` or `modules_to_not_convert` has an unquantised weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.checkpoint.text_tower import text_config

MODELOPT_FILE: Final = "hf_quant_config.json"


class Method(Enum):
    """The values of `quantization_config.quant_method` that are served."""

    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"
    BITSANDBYTES = "bitsandbytes"
    MODELOPT = "modelopt"
    GGUF = "gguf"  # written by workers/gguf/converter.py


_FORMATS: Final = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "dense",
)  # fmt: skip
_MODELOPT: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8")  # `quant_algo`
_GPTQ_BITS: Final = (2, 4, 8)
_FP8_BLOCK: Final = (128, 128)  # DeepSeek's
_ACTIVATION_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class QuantisationScheme:
    """`bits`: of AWQ, GPTQ and bitsandbytes; else 0. `group_size`: of AWQ and GPTQ; -1: one group for all columns.

    `block`: (rows, columns) that share a scale in block-quantised FP8 checkpoints. `zero_offset`: added to GPTQ's
    stored zero points. `activations`: `float`, `int` or both: linears with 8-bit weights of such a type also quantise
    their activations to it.
    """

    method: Method
    bits: int = 0
    group_size: int = 0
    block: tuple[int, int] = _FP8_BLOCK
    zero_offset: int = 0
    activations: frozenset[str] = frozenset()


def read_model_config(file: Path) -> dict[str, Any] | None:
    """The JSON object of a config.json; None if there is no such file. Raises InvalidModel for a file that holds no
    JSON object.

    Some checkpoints of ModelOpt have their settings only in the hf_quant_config.json beside it. These become the
    quantization_config.
    """
    config = read_json_object(file)
    if config is not None and config.get("quantization_config") is None:
        separate = read_json_object(file.with_name(MODELOPT_FILE))
        if separate is not None:
            config["quantization_config"] = {**separate, "quant_method": Method.MODELOPT.value}
    return config


def read_scheme(name: str, config: Mapping[str, Any]) -> QuantisationScheme | None:
    """The scheme of a config.json; None for a checkpoint that is not quantised. `name`: of the model, for errors.

    Raises InvalidModel for a method or variant that is not served.
    """
    text = text_config(config)
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    settings = config.get("quantization_config") or inner
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise InvalidModel(f"{name}: quantization_config in config.json is no JSON object; fetch config.json again")
    served = ", ".join(method.value for method in Method)
    try:
        method = Method(settings.get("quant_method"))
    except ValueError:
        raise InvalidModel(
            f"{name} is quantised with {settings.get('quant_method')!r}, which is not served; use a checkpoint with "
            f"one of {served}, or an unquantised one"
        ) from None
    try:
        return _READERS[method](name, settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidModel(
            f"{name}: quantization_config in config.json is malformed ({error}); fetch config.json again"
        ) from error


def check_quantization(name: str, quantization: str, scheme: QuantisationScheme | None) -> None:
    """Raise InvalidConfig if the checkpoint is quantised already and `quantization` is not auto."""
    if quantization == "auto":
        return
    if scheme is not None:
        raise InvalidConfig(
            f"quantization: {name} is quantised with {scheme.method.value} already; leave --quantization out, or serve "
            "the unquantised checkpoint"
        )


def _refuse(name: str, what: str, instead: str) -> InvalidModel:
    return InvalidModel(f"{name} is quantised with {what}, which is not served; use {instead}")


def _read_compressed_tensors(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refuse(name, f"the sparse format {sparsity['format']}", "a dense checkpoint")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _refuse(name, "transforms of activations", "a checkpoint without transform_config")
    block = _FP8_BLOCK
    groups = settings.get("config_groups") or {}
    for kind in {settings.get("format"), *(group.get("format") for group in groups.values())} - {None}:
        if kind not in (*_FORMATS, "mixed-precision"):
            raise _refuse(name, f"compressed-tensors format {kind}", f"one of {', '.join(_FORMATS)}")
    for group in groups.values():
        weights = group.get("weights") or {}
        if structure := weights.get("block_structure"):
            block = _read_block(structure)
    return QuantisationScheme(Method.COMPRESSED_TENSORS, block=block, activations=_quantised_activations(groups))


def _quantised_activations(groups: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The types of 8-bit weights, `float` or `int`, for which every group of the config asks for symmetric 8-bit
    activations of the same type.

    The group's strategy for activations is not read: linears compute one scale for each row, or for each group of
    columns of the weight. Static scales of the checkpoint are not read either.
    """
    asks: dict[str, bool] = {}
    for group in groups.values():
        weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
        if weights.get("num_bits") == _ACTIVATION_BITS:
            kind = str(weights.get("type"))
            matches = activations.get("num_bits") == _ACTIVATION_BITS and activations.get("type") == kind
            asks[kind] = asks.get(kind, True) and matches and activations.get("symmetric", True)
    return frozenset(kind for kind, is_asked in asks.items() if is_asked)


def _read_fp8(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    kind = settings.get("fmt", "e4m3")
    if kind != "e4m3":
        raise _refuse(name, f"FP8 {kind}", "an e4m3 checkpoint")
    block = _read_block(settings.get("weight_block_size") or _FP8_BLOCK)
    return QuantisationScheme(Method.FP8, block=block, activations=frozenset(("float",)))


def _read_block(sizes: Any) -> tuple[int, int]:
    rows, columns = map(int, sizes)
    if rows < 1 or columns < 1:
        raise ValueError(f"blocks of {rows} rows and {columns} columns")
    return rows, columns


def _read_awq(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    bits, version = int(settings.get("bits", settings.get("w_bit", 4))), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refuse(name, f"AWQ of {bits} bits in the {version} layout", "AWQ of 4 bits in the gemm layout")
    return QuantisationScheme(Method.AWQ, bits, int(settings.get("group_size", settings.get("q_group_size", 128))))


def _read_gptq(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    bits, layout = int(settings.get("bits", 4)), settings.get("checkpoint_format") or "gptq"
    if bits not in _GPTQ_BITS or layout not in ("gptq", "gptq_v2"):
        raise _refuse(name, f"GPTQ of {bits} bits in the {layout} layout", "2, 4 or 8 bits in the gptq layout")
    offset = 1 if layout == "gptq" else 0
    return QuantisationScheme(Method.GPTQ, bits, int(settings.get("group_size", 128)), zero_offset=offset)


def _read_mxfp4(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    return QuantisationScheme(Method.MXFP4)


def _read_bitsandbytes(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    kind = settings.get("bnb_4bit_quant_type") if settings.get("load_in_4bit") else "int8"
    if kind != "nf4":
        raise _refuse(name, f"bitsandbytes {kind}", "an nf4 checkpoint")
    return QuantisationScheme(Method.BITSANDBYTES, 4)


def _read_modelopt(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    algorithm = (settings.get("quantization") or settings).get("quant_algo")
    if algorithm not in _MODELOPT:
        raise _refuse(name, f"ModelOpt's {algorithm}", f"one of {', '.join(_MODELOPT)}")
    # Linears with 4-bit weights take activations of the model's dtype, whatever the checkpoint asks for.
    return QuantisationScheme(Method.MODELOPT, activations=frozenset(("float",)))


def _read_gguf(name: str, settings: Mapping[str, Any]) -> QuantisationScheme:
    return QuantisationScheme(Method.GGUF)


_READERS: Final = {
    Method.COMPRESSED_TENSORS: _read_compressed_tensors,
    Method.FP8: _read_fp8,
    Method.AWQ: _read_awq,
    Method.GPTQ: _read_gptq,
    Method.MXFP4: _read_mxfp4,
    Method.BITSANDBYTES: _read_bitsandbytes,
    Method.MODELOPT: _read_modelopt,
    Method.GGUF: _read_gguf,
}
