"""Quantised copies of a tiny checkpoint, in the published layouts.

compressed-tensors checkpoints are written by that library. The other writers follow the layouts of AutoAWQ, AutoGPTQ,
DeepSeek-V3, gpt-oss and bitsandbytes element by element, in plain loops that share nothing with the code under test.
Each writer returns the weights that its codes stand for, by name, in float32.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
# What a method makes of one weight: its stored tensors by leaf name, and the weight that they stand for.
Quantise = Callable[[Tensor], tuple[Weights, Tensor]]


# By code.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_QUANTISED = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def write_quantised(source: Path, target: Path, config: dict[str, Any], quantise: Quantise) -> Weights:
    """Copies a checkpoint with its layers' linears and experts quantised."""
    shutil.copytree(source, target)
    stored: Weights = {}
    plain: Weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in name and name.endswith(_QUANTISED):
            parts, plain[name] = quantise(tensor.float())
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{leaf}": part.contiguous() for leaf, part in parts.items()}
        else:
            stored[name] = plain[name] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    edit_quantisation(target, **config)
    return plain


def edit_quantisation(checkpoint: Path, **config: Any) -> None:
    """Sets fields of quantization_config in config.json."""
    file = checkpoint / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"] = {**values.get("quantization_config", {}), **config}
    file.write_text(json.dumps(values))


def write_compressed(source: Path, target: Path, **weights: Any) -> Weights:
    """A checkpoint of the compressed-tensors library. `weights`: fields of its QuantizationArgs."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        fake_quantize,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    activations = weights.pop("activations", None)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**activations) if activations else None,
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    plain = load_file(source / "model.safetensors")
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        arguments, weight = module.quantization_scheme.weights, module.weight.data
        blocks = _blocks(weight, arguments)
        whole = None
        if hasattr(module, "weight_global_scale"):
            whole = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data.copy_(whole)
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments, whole)
        scale, zero = scale.reshape(module.weight_scale.shape), zero.reshape(module.weight_scale.shape)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
        plain[f"{name}.weight"] = fake_quantize(weight, scale, zero, arguments, global_scale=whole)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(source, target)
    model.save_pretrained(target)
    compressor.update_config(target)
    return plain


def _blocks(weight: Tensor, arguments: Any) -> Tensor:
    """[row blocks, rows, column blocks, columns]"""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, arguments.group_size),
        "tensor_group": (1, arguments.group_size),
        "block": tuple(arguments.block_structure or ()),
    }[str(getattr(arguments.strategy, "value", arguments.strategy))]
    return weight.reshape(rows // height, height, columns // width, width)


def awq(bits: int, group: int) -> Quantise:
    """AutoAWQ's gemm layout."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        codes, scales, zeros = _affine(weight, bits, group)  # [rows, columns], [rows, groups] twice
        plain = _plain(codes, scales.half().float(), zeros, group)
        return {
            "qweight": _pack(codes.T.tolist(), bits, order),
            "qzeros": _pack(zeros.T.tolist(), bits, order),
            "scales": scales.T.half(),
        }, plain

    return quantise


def gptq(bits: int, group: int, *, offset: int = 1, ordered: bool = False) -> Quantise:
    """AutoGPTQ's layout. `offset`: what is taken off zero points. `ordered`: columns belong to groups in any order."""

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        generator = torch.Generator().manual_seed(columns)
        members = torch.randperm(columns, generator=generator) if ordered else torch.arange(columns)
        codes, scales, zeros = _affine(weight[:, members], bits, size)
        zeros = zeros.clamp(min=offset)  # a stored zero point is never negative
        codes = codes.clamp(0, (1 << bits) - 1)
        plain = torch.empty_like(weight)
        plain[:, members] = _plain(codes, scales.half().float(), zeros, size)
        back = torch.empty_like(codes)
        back[:, members] = codes
        groups = torch.empty(columns, dtype=torch.int32)
        groups[members] = torch.arange(columns, dtype=torch.int32) // size
        return {
            "qweight": _pack(back.tolist(), bits).T,
            "qzeros": _pack((zeros - offset).T.tolist(), bits),
            "scales": scales.T.half(),
            "g_idx": groups,
        }, plain

    return quantise


def packed_int4(group: int) -> Quantise:
    """compressed-tensors' layout of symmetric 4-bit groups, in which Kimi K2's experts are published."""

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        rows, columns = weight.shape
        scales = (weight.reshape(rows, -1, group).abs().amax(2) / 7).clamp(min=1e-6).bfloat16()
        wide = scales.float().repeat_interleave(group, 1)
        codes = (weight / wide).round().int().clamp(-8, 7)
        shape = torch.tensor([rows, columns], dtype=torch.int64)
        packed = _pack((codes + 8).tolist(), 4)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, codes * wide

    return quantise


def codes_by_row(dtype: torch.dtype) -> Quantise:
    """compressed-tensors' layout of `dtype` (int8 or float8_e4m3fn) with a scale for each row, in which experts are
    published as "FP8-dynamic" and "W8A8"."""
    largest = 448 if dtype.is_floating_point else 127

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / largest).clamp(min=1e-6).bfloat16()
        scaled = (weight / scales.float()).clamp(-largest, largest)
        codes = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    return quantise


def fp8_blocks(height: int, width: int) -> Quantise:
    """DeepSeek-V3's layout; the last blocks of a matrix may be smaller."""

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        rows, columns = weight.shape
        codes, plain = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        scales = torch.empty(-(-rows // height), -(-columns // width))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                scales[row, column] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
                plain[place] = codes[place].float() * scales[row, column]
        return {"weight": codes, "weight_scale_inv": scales}, plain

    return quantise


def nvfp4(weight: Tensor) -> tuple[Weights, Tensor]:
    """ModelOpt's layout: e2m1 in groups of 16 with scales in e4m3, and a scale in float32 for the whole weight."""
    rows, columns = weight.shape
    whole = weight.abs().max() / (6 * 448)
    groups = weight.reshape(rows, columns // 16, 16)
    scales = (groups.abs().amax(2) / 6 / whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
    wide = scales.float() * whole
    codes = (groups / wide[..., None]).unsqueeze(-1).sub(_E2M1).abs().argmin(-1)
    plain = (_E2M1[codes] * wide[..., None]).reshape(rows, columns)
    packed = [
        [row[place] | row[place + 1] << 4 for place in range(0, columns, 2)]
        for row in codes.reshape(rows, columns).tolist()
    ]
    return {
        "weight": torch.tensor(packed, dtype=torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(1.0),
    }, plain


def fp8_tensor(weight: Tensor) -> tuple[Weights, Tensor]:
    """ModelOpt's layout of FP8, with a scale for the whole weight."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, codes.float() * scale


def nf4(*, nested: bool) -> Quantise:
    """bitsandbytes' layout with blocks of 64. `nested`: scales are quantised, too."""
    table = torch.tensor(
        [
            *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
            *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
        ]
    )

    def quantise(weight: Tensor) -> tuple[Weights, Tensor]:
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        parts: Weights = {}
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        if nested:
            levels, mean = torch.linspace(-1, 1, 256), scales.mean()
            outer = torch.stack([part.abs().amax() for part in (scales - mean).split(256)])
            codes = [
                int((levels - (scale - mean) / outer[place // 256]).abs().argmin())
                for place, scale in enumerate(scales)
            ]
            scales = torch.stack([levels[code] * outer[place // 256] + mean for place, code in enumerate(codes)])
            parts |= {
                "weight.absmax": torch.tensor(codes, dtype=torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": levels.clone(),
            }
            state |= {"nested_offset": float(mean), "nested_blocksize": 256, "nested_dtype": "float32"}
        else:
            parts["weight.absmax"] = scales
        indices = (blocks / scales[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1).flatten().tolist()
        packed = [indices[place] << 4 | indices[place + 1] for place in range(0, len(indices), 2)]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts |= {
            "weight": torch.tensor(packed, dtype=torch.uint8)[:, None],
            "weight.quant_map": table.clone(),
            "weight.quant_state.bitsandbytes__nf4": text,
        }
        return parts, (table[indices].reshape(-1, 64) * scales[:, None]).reshape(weight.shape)

    return quantise


def mxfp4_experts(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gpt-oss's layout of experts [experts, columns, rows]: (blocks, scales, the weights that they stand for)."""
    by_row = experts.transpose(1, 2).float()
    count, rows, columns = by_row.shape
    blocks = by_row.reshape(count, rows, columns // 32, 32)
    exponents = blocks.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
    codes = (blocks / exponents.exp2()[..., None]).unsqueeze(-1).sub(_E2M1).abs().argmin(-1)
    plain = (_E2M1[codes] * exponents.exp2()[..., None]).reshape(by_row.shape).transpose(1, 2)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return packed, (exponents + 127).to(torch.uint8), plain.contiguous()


def write_mxfp4(source: Path, target: Path) -> Weights:
    """A copy of a gpt-oss checkpoint with its experts in MXFP4."""
    shutil.copytree(source, target)
    stored = load_file(source / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, plain[name] = mxfp4_experts(stored.pop(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    edit_quantisation(target, quant_method="mxfp4")
    return plain


def _affine(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [rows, columns], scales [rows, groups], zero points [rows, groups]), the last as integers."""
    groups = weight.reshape(weight.shape[0], -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-6)
    zeros = (-low / scales).round().int()
    codes = (groups / scales[..., None] + zeros[..., None]).round().int().clamp(0, (1 << bits) - 1)
    return codes.reshape(weight.shape), scales, zeros


def _plain(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    return (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def _pack(rows: list[list[int]], bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Packs 32 / bits neighbours of each row into an int32. `order`: the neighbour in each field, from the lowest."""
    count = 32 // bits
    order = order or tuple(range(count))
    packed = [
        [
            sum(row[start + neighbour] << (bits * field) for field, neighbour in enumerate(order))
            for start in range(0, len(row), count)
        ]
        for row in rows
    ]
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


# Writes a quantised copy of a checkpoint, and returns the weights that it stands for.
Write = Callable[[Path, Path], Weights]

_DYNAMIC_INT8: dict[str, Any] = dict(num_bits=8, type="int", strategy="token", dynamic=True)
_DYNAMIC_FP8: dict[str, Any] = dict(num_bits=8, type="float", strategy="token", dynamic=True)


def compressed(**weights: Any) -> Write:
    return partial(write_compressed, **weights)


def written(quantise: Any, **config: Any) -> Write:
    return lambda source, target: write_quantised(source, target, config, quantise)


FORMATS: dict[str, Write] = {
    "compressed-w4a16-g32": compressed(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
    "compressed-w4a16-g32-asym": compressed(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
    "compressed-w4a16-channel": compressed(num_bits=4, type="int", symmetric=True, strategy="channel"),
    "compressed-w8a16": compressed(num_bits=8, type="int", symmetric=True, strategy="channel"),
    "compressed-w8a8-int": compressed(
        num_bits=8, type="int", symmetric=True, strategy="channel", activations=_DYNAMIC_INT8
    ),
    "compressed-fp8-tensor": compressed(num_bits=8, type="float", symmetric=True, strategy="tensor"),
    "compressed-fp8-channel": compressed(
        num_bits=8, type="float", symmetric=True, strategy="channel", activations=_DYNAMIC_FP8
    ),
    "compressed-fp8-block": compressed(
        num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[16, 32]
    ),
    "compressed-nvfp4": compressed(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    ),
    "compressed-mxfp4": compressed(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
    "compressed-mxfp8": compressed(
        num_bits=8, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
    "modelopt-nvfp4": written(nvfp4, quant_method="modelopt", quant_algo="NVFP4"),
    "modelopt-fp8": written(fp8_tensor, quant_method="modelopt", quant_algo="FP8"),
    "fp8-block": written(fp8_blocks(16, 40), quant_method="fp8", weight_block_size=[16, 40]),
    "packed-int4": written(
        packed_int4(32), quant_method="compressed-tensors", format="pack-quantized", config_groups={}
    ),
    "fp8-by-row": written(
        codes_by_row(torch.float8_e4m3fn), quant_method="compressed-tensors", format="float-quantized", config_groups={}
    ),
    "int8-by-row": written(
        codes_by_row(torch.int8), quant_method="compressed-tensors", format="int-quantized", config_groups={}
    ),
    "awq": written(awq(4, 32), quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
    "gptq": written(gptq(4, 32), quant_method="gptq", bits=4, group_size=32),
    "gptq-v2": written(gptq(4, 32, offset=0), quant_method="gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"),
    "gptq-8bit-one-group": written(gptq(8, -1), quant_method="gptq", bits=8, group_size=-1),
    "gptq-2bit": written(gptq(2, 16), quant_method="gptq", bits=2, group_size=16),
    "gptq-act-order": written(gptq(4, 32, ordered=True), quant_method="gptq", bits=4, group_size=32, desc_act=True),
    "nf4": written(nf4(nested=False), quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4-nested": written(nf4(nested=True), quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}  # fmt: skip
# (family, format) of checkpoints with experts that tests serve.
EXPERT_CASES = [
    ("gpt-oss", "mxfp4"), ("mixtral", "awq"),
    ("qwen3-moe", "fp8-block"), ("qwen3-moe", "fp8-by-row"), ("qwen3-moe", "int8-by-row"), ("qwen3-moe", "packed-int4"),
    ("qwen3-moe", "awq"), ("qwen3-moe", "gptq"), ("qwen3-moe", "gptq-act-order"), ("qwen3-moe", "nf4"),
    ("qwen3-moe", "modelopt-nvfp4"), ("deepseek-v3", "modelopt-nvfp4"),
    ("deepseek-v3", "fp8-block"), ("deepseek-v3", "fp8-by-row"), ("deepseek-v3", "int8-by-row"),
    ("deepseek-v3", "packed-int4"), ("deepseek-v3", "awq"), ("deepseek-v3", "gptq"),
]  # fmt: skip
