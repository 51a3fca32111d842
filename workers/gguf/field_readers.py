"""Fields of config.json that many model families share, read from a GGUF file's metadata. Imports no torch."""

from typing import Any, Final

import numpy as np

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.block_codes import dequantise
from coatcheck.workers.gguf.gguf_file import GgufFile

Fields = dict[str, Any]

# Llama 3's rotary scaling. Its factor differs from model to model, these are the same for all.
_LLAMA3: Final = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def gated_fields(file: GgufFile, *, inner: int | None = None) -> Fields:
    """The fields of decoders with RMS norms. `inner`: the width of the MLP, for families whose metadata may lack or
    list it."""
    return size_fields(file, inner=inner) | dict(rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"))


def size_fields(file: GgufFile, *, inner: int | None = None) -> Fields:
    heads = file.count("attention.head_count")
    return dict(
        vocab_size=vocab_size(file),
        hidden_size=file.count("embedding_length"),
        intermediate_size=file.count("feed_forward_length") if inner is None else inner,
        num_hidden_layers=file.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads(file),
        max_position_embeddings=file.count("context_length"),
        rope_parameters=rope_fields(file, 10000.0),
    )


def kv_heads(file: GgufFile) -> int:
    """The number of key/value heads. Metadata may list it by layer, with 0 for a layer without attention; other layers
    then have the largest number."""
    listed = file.find("attention.head_count_kv")
    if isinstance(listed, list) and listed and all(isinstance(heads, int) for heads in listed):
        return int(max(listed))
    return file.count("attention.head_count_kv", file.count("attention.head_count"))


def vocab_size(file: GgufFile) -> int:
    return file.tensor("token_embd.weight").shape[0]


def has_tensor(file: GgufFile, tensor: str) -> bool:
    return tensor in file.tensors


def head_width(file: GgufFile) -> int:
    """The width of a head by `attention.key_length`, whose default is hidden_size / heads."""
    return file.count("attention.key_length", file.count("embedding_length") // file.count("attention.head_count"))


def rotated_head_width(file: GgufFile) -> int:
    """As `head_width`, for families that rotate whole heads. Raises InvalidModel for one that does not."""
    width = head_width(file)
    if (rotated := file.count("rope.dimension_count", width)) != width:
        raise InvalidModel(
            f"{file.path} rotates {rotated} of the {width} elements of a head, which {file.architecture} does not do"
        )
    return width


def rotary_share(file: GgufFile) -> float:
    width = head_width(file)
    return file.count("rope.dimension_count", width) / width


def tensor_values(file: GgufFile, tensor: str) -> list[float]:
    found = file.tensor(tensor)
    return [float(value) for value in dequantise(found.type, found.read_rows()).ravel()]


def rope_fields(file: GgufFile, theta: float) -> Fields:
    """rope_parameters. `theta`: the base of files that have none."""
    fields: Fields = dict(rope_type="default", rope_theta=float(file.number("rope.freq_base", theta)))
    if has_tensor(file, "rope_freqs.weight"):
        return fields | _scaled_frequencies(file)
    kind = file.find("rope.scaling.type")
    factor = file.number("rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1:
        return fields | dict(rope_type="linear", factor=float(factor))
    if kind == "yarn":
        fields |= dict(rope_type="yarn", factor=float(factor))
        optional = {
            "original_max_position_embeddings": file.find("rope.scaling.original_context_length"),
            "beta_fast": file.find("rope.scaling.yarn_beta_fast"),
            "beta_slow": file.find("rope.scaling.yarn_beta_slow"),
        }
        return fields | {name: value for name, value in optional.items() if value is not None}
    if kind in (None, "none", "linear", "longrope"):  # longrope: its factors are tensors
        return fields
    raise InvalidModel(f"{file.path} scales rotary embeddings by {kind!r}, which is not read; served are linear, yarn")


def _scaled_frequencies(file: GgufFile) -> Fields:
    """The fields for `rope_freqs`, by which the frequencies are divided: those of Llama 3 if they give these divisors,
    else the divisors themselves."""
    divisors = np.array(tensor_values(file, "rope_freqs.weight"))
    factor = float(round(divisors.max(), 3))
    theta, original = file.number("rope.freq_base", 10000.0), _LLAMA3["original_max_position_embeddings"]
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # how much of a frequency is not scaled
    if np.allclose(1 / ((1 - share) / factor + share), divisors, rtol=1e-5):
        return dict(rope_type="llama3", factor=factor, **_LLAMA3)
    listed = divisors.tolist()
    length = file.count("context_length")
    return dict(
        rope_type="longrope", factor=1.0, attention_factor=1.0, original_max_position_embeddings=length,
        short_factor=listed, long_factor=listed,
    )  # fmt: skip
