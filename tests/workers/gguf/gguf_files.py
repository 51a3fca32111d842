"""write_file(): a checkpoint as a GGUF file, written with llama.cpp's own writer. Its parts: tokenizers and blocks.

Blocks of types that the `gguf` package cannot quantise to are random.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.workers.gguf.gguf_metadata import add_fields
from tests.workers.gguf.gguf_weights import write_weights

PACKAGE_QUANTISES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.F16, Type.BF16, Type.F32)
# The places of the float16 scale of a block, and of the scale of its minima.
_HALVES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.IQ3_S: (0,), Type.IQ2_XXS: (0,),
}  # fmt: skip
# A scale with which random blocks have values of about 0.25. Minima are scaled so that the mean is about 0.
_SCALES = {
    Type.Q2_K: (0.02, 0.03), Type.Q3_K: (0.006,), Type.Q4_K: (0.001, 0.0075), Type.Q5_K: (0.0005, 0.00775),
    Type.Q6_K: (0.0002,), Type.IQ4_NL: (0.004,), Type.IQ4_XS: (0.0002,), Type.IQ3_S: (0.002,), Type.IQ2_XXS: (0.002,),
}  # fmt: skip
_TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
# What tokens a tiny model has besides bytes; the third ends an answer.
_MARKERS = ("<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>")

KindOf = Callable[[str], Type]  # of the GGUF name of a matrix


def write_file(
    source: Path, path: Path, arch: str, kind_of: KindOf, tokenizer: Tokenizer, **metadata: str
) -> dict[str, Tensor]:
    """Write the checkpoint `source` as a GGUF file. Returns the weights that the file stands for."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    add_fields(writer, arch, config)
    add_byte_level(writer, tokenizer)
    for key, value in metadata.items():
        writer.add_string(key, value)
    weights = load_file(source / "model.safetensors")

    def store(name: str, values: np.ndarray, seed: int, *, is_plain: bool = False) -> np.ndarray:
        kind = Type.F32 if is_plain else kind_of(name)
        stored = quantise(values, kind, seed)
        writer.add_tensor(name, stored, raw_dtype=kind)
        return gguf.quants.dequantize(stored, kind).astype(np.float32)

    held = write_weights(store, arch, config, weights)
    finish(writer)
    return held


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with GPT-2's way to split, a few merges and the special tokens _MARKERS."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(marker, special=True) for marker in _MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat there in the den"], trainer)
    return tokenizer


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    state = json.loads(tokenizer.to_str())
    special = {token["content"]: token for token in state["added_tokens"]}
    tokens = sorted(ids := tokenizer.get_vocab(), key=lambda token: ids[token])
    kinds = [
        gguf.TokenType.NORMAL
        if token not in special
        else gguf.TokenType.CONTROL
        if special[token]["special"]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(_TEMPLATE)


def quantise(values: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """The rows of a matrix as stored bytes; random blocks for types that the package cannot quantise to."""
    if kind in PACKAGE_QUANTISES:
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    count = values.size // block
    stored = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place, scale in zip(_HALVES[kind], _SCALES[kind], strict=True):
        halves = rng.uniform(0.5, 1.5, (count, 1)) * scale
        stored[:, place : place + 2] = halves.astype(np.float16).view(np.uint8)
    if kind in (Type.Q4_K, Type.Q5_K):
        stored[0, 4:16] = 0  # groups whose scale and minimum are 0
        stored[-1, 4:8] = 0  # groups whose scale is 0, with minima
        stored[-1, 12:16] &= 0xF0
    return stored.reshape(*values.shape[:-1], -1)
