"""Conversion: a GGUF file as a checkpoint directory in transformers' format.

The directory has config.json, the files of the tokenizer and model.safetensors. Quantised weights of linears keep their
codes, with the names that compressed-tensors gives to codes and scales; the zero points of types with a minimum are
fractions, so config.json names the method `gguf` (workers/checkpoint/quantised_layouts.py). Each thread has a few rows
of one tensor in memory. Imports no torch.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry
from coatcheck.workers.gguf.block_codes import FORMS, PLAIN, Array, Kind, dequantise, read_codes
from coatcheck.workers.gguf.families import family_of
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.tokenizer_files import special_tokens, write_tokenizer
from coatcheck.workers.gguf.weight_plan import Weight, choose_dtype, plan_weights

Progress = Callable[[int, int], None]

_CHUNK: Final = 1 << 22  # elements of a tensor that a thread converts at a time
_MOST_THREADS: Final = 16
_ITEMSIZE: Final = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of model.safetensors. `dtype`: by safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some stored rows of a tensor of the type `kind`. `places`: of these rows among those that are converted with
    them; None: they are all."""

    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]
    places: Array | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a GGUF file becomes, known from its header. `config`: of config.json."""

    file: GgufFile
    config: dict[str, Any]
    weights: Sequence[Weight]

    @classmethod
    def plan(cls, path: Path, dtype: str = "auto") -> Self:
        """`dtype`: of weights that are dequantised; auto: see choose_dtype. Raises InvalidModel for a file that is
        broken or not served."""
        file = GgufFile.open(path)
        family = family_of(file)
        dtype = choose_dtype(file) if dtype == "auto" else dtype
        weights = plan_weights(file, family, dtype)
        config = {"model_type": family.model_type, **family.config(file), **special_tokens(file)}
        # llama.cpp's converter leaves out a head that equals the embedding.
        config |= {"tie_word_embeddings": "output.weight" not in file.tensors, "dtype": dtype}
        if any(weight.form is not None for weight in weights):
            config["quantization_config"] = {"quant_method": "gguf"}
        return cls(file, config, weights)

    @property
    def tensors(self) -> list[OutputTensor]:
        """What model.safetensors has, in its order: the widest elements first, so that all are aligned."""
        found = [tensor for weight in self.weights for tensor in output_tensors(weight)]
        return sorted(found, key=lambda tensor: -_ITEMSIZE[tensor.dtype])

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors as the headers of the converted directory will have them, without their places in a file."""
        return {tensor.name: TensorEntry(self.file.path, tensor.dtype, tensor.shape, 0, 0) for tensor in self.tensors}

    def write(self, directory: Path, progress: Progress | None = None) -> None:
        """Write all files into an empty directory. `progress(done_bytes, total_bytes)`: called after each piece."""
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        write_tokenizer(self.file, directory)
        tensors = self.tensors
        total, done = sum(tensor.nbytes for tensor in tensors), 0
        with (directory / "model.safetensors").open("wb") as out:
            starts = _write_header(out, tensors)
            for weight, pieces in _convert_in_threads(self.weights):
                for tensor, piece in zip(output_tensors(weight), pieces, strict=True):
                    out.seek(starts[tensor.name])
                    out.write(np.ascontiguousarray(piece).data)
                    starts[tensor.name] += piece.nbytes
                    done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())


def output_tensors(weight: Weight) -> list[OutputTensor]:
    """The tensors that store a weight: itself, or codes, scales and zero points."""
    if weight.form is None:
        return [OutputTensor(weight.name, weight.dtype, weight.shape)]
    form, columns = weight.form, weight.shape[-1]
    scales = (*weight.shape[:-1], columns // form.group)
    if weight.are_blocks:
        blocks = OutputTensor(f"{weight.name}_blocks", "U8", (*scales, form.group // 2))
        return [blocks, OutputTensor(f"{weight.name}_scales", "U8", scales)]
    codes = {
        Kind.INT8: OutputTensor(weight.name, "I8", weight.shape),
        Kind.INT4: OutputTensor(f"{weight.name}_packed", "I32", (*weight.shape[:-1], columns // 8)),
        Kind.FP4: OutputTensor(f"{weight.name}_packed", "U8", (*weight.shape[:-1], columns // 2)),
    }[form.kind]
    found = [codes, OutputTensor(f"{weight.name}_scale", form.scales, scales)]
    return [*found, OutputTensor(f"{weight.name}_zero_point", "F32", scales)] if form.has_zeros else found


def _write_header(out: Any, tensors: Sequence[OutputTensor]) -> dict[str, int]:
    """Write the header of a safetensors file. Returns {tensor: the byte at which its data begins}."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, at = {}, 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        ends[tensor.name] = at
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + start for name, start in ends.items()}


def _convert_in_threads(weights: Sequence[Weight]) -> Iterator[tuple[Weight, list[Array]]]:
    """(weight, pieces of its output_tensors), some rows at a time, in order. numpy releases the GIL as it computes."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    running: deque[tuple[Weight, Future[list[Array]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for weight in weights:
                step = max(1, _CHUNK // weight.sources[0].columns)
                if weight.is_transposed:
                    step = weight.shape[-1]  # each matrix whole
                if weight.are_latent_heads:
                    step = weight.num_rows
                for start in range(0, weight.num_rows, step):
                    running.append((weight, pool.submit(_convert, weight, start, start + step)))
                    if len(running) > threads:
                        done, future = running.popleft()
                        yield done, future.result()
            for done, future in running:
                yield done, future.result()
        finally:
            for _, future in running:
                future.cancel()


def _convert(weight: Weight, start: int, stop: int) -> list[Array]:
    """The pieces of output_tensors(weight) from the rows [start, stop) of each source."""
    if weight.are_latent_heads:
        keys, values = (dequantise(source.type, source.read_rows()).reshape(source.shape) for source in weight.sources)
        return [_cast(join_latent_heads(keys, values), weight.dtype)]
    pieces = _read_rows(weight, start, stop)
    return [_plain(weight, pieces)] if weight.form is None else _codes(weight, pieces)


def _read_rows(weight: Weight, start: int, stop: int) -> list[_Piece]:
    """The stored rows of which the rows [start, stop) of a weight are made, by source."""
    if weight.rows is None:
        [source] = weight.sources
        return [_Piece(source.type, source.read_rows()[start:stop])]
    rows = weight.rows[start:stop]
    if len(weight.sources) == 1:
        return [_Piece(weight.sources[0].type, weight.sources[0].read_rows()[rows])]
    pieces, first = [], 0
    for source in weight.sources:
        places = np.flatnonzero((rows >= first) & (rows < first + source.rows))
        pieces.append(_Piece(source.type, source.read_rows()[rows[places] - first], places))
        first += source.rows
    return pieces


def join_latent_heads(keys: Array, values: Array) -> Array:
    """kv_b_proj of latent attention, [heads × (columns of a key + columns of a value), latent], of keys
    [heads, latent, columns of a key] and values [heads, columns of a value, latent]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _plain(weight: Weight, pieces: Sequence[_Piece]) -> Array:
    """The elements in the weight's dtype, as bytes or numbers."""
    is_changed = weight.is_transposed or weight.change is not None or weight.columns is not None
    if len(pieces) == 1 and not is_changed and PLAIN.get(pieces[0].kind) == weight.dtype:
        return pieces[0].rows
    values = _in_order(pieces, [dequantise(piece.kind, piece.rows) for piece in pieces])
    if weight.columns is not None:
        values = values[:, weight.columns]
    if weight.change is not None:
        values = weight.change(values)
    return _cast(values.T if weight.is_transposed else values, weight.dtype)


def _codes(weight: Weight, pieces: Sequence[_Piece]) -> list[Array]:
    form = weight.form
    assert form is not None
    found = [read_codes(piece.kind, piece.rows).in_form(FORMS[piece.kind], form) for piece in pieces]
    codes = _in_order(pieces, [one.codes for one in found])
    zeros = [one.zeros for one in found if one.zeros is not None]
    groups = [_in_order(pieces, [one.scales for one in found]), *([_in_order(pieces, zeros)] if zeros else [])]
    if weight.columns is not None:
        codes = codes[:, weight.columns]
        groups = [one[:, weight.columns[:: form.group] // form.group] for one in groups]
    return [_pack(codes, form.kind), *groups]


def _in_order(pieces: Sequence[_Piece], parts: Sequence[Array]) -> Array:
    """The rows of `parts`, each made of one piece, at their places in the weight."""
    if len(parts) == 1:
        return parts[0]
    rows: Array = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for piece, part in zip(pieces, parts, strict=True):
        rows[piece.places] = part
    return rows


def _pack(codes: Array, kind: Kind) -> Array:
    """Codes of 4 bits as two in a byte, the left one in the lower half. Integers have 8 added, as compressed-tensors
    packs them; eight of them are an int32 of little-endian machines."""
    if kind is Kind.INT8:
        return codes
    halves = (codes + 8 if kind is Kind.INT4 else codes).astype(np.uint8)
    return halves[:, 0::2] | halves[:, 1::2] << np.uint8(4)


def _cast(values: Array, dtype: str) -> Array:
    """float32 -> F32, F16, or the upper halves that are BF16, rounded to the nearest, ties to even."""
    if dtype != "BF16":
        return values.astype(np.float32 if dtype == "F32" else np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
