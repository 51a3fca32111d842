"""GgufFile: the metadata and the tensors of a GGUF model, read from the headers of its file or files.

The format: a magic number, a version, the numbers of tensors and of metadata entries, the entries, one description for
each tensor, and the tensors' data. A model may be split into files NAME-00001-of-0000N.gguf, and each has some of the
tensors. The `gguf` package takes nine seconds for the header of a vocabulary of 150,000 tokens, so headers are read
here. Imports no torch.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.model_path import MAGIC, model_stem, split_files

_VERSIONS: Final = (2, 3)  # version 1 has 32-bit sizes; llama.cpp does not read it either
_AGAIN: Final = "fetch it again"

# {number of a metadata type: its format in struct}. 8 is a text, 9 an array.
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32: Final = 6
_TEXT: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of `shape`, rows before columns. Its data begins at byte `start` of `file`."""

    name: str
    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """The number of rows of all matrices of the tensor together."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.columns // block * size

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def read_rows(self) -> NDArray[np.uint8]:
        """The stored bytes, mapped from the file: uint8 [rows, row_bytes]."""
        return np.memmap(self.file, np.uint8, "r", self.start, (self.rows, self.row_bytes))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`path`: of the file, the first one of a split model. `files`: all of them. `architecture`: llama.cpp's name of
    the model family. `metadata`: numbers, texts and lists by key."""

    path: Path
    files: tuple[Path, ...]
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises InvalidModel for a broken file, a missing part, or a tensor of an unknown type."""
        files = split_files(path)
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for file in files:
            part_metadata, part_tensors = _read_header(file)
            metadata = part_metadata | metadata  # the first file has the model's, the others only their place
            if repeated := part_tensors.keys() & tensors.keys():
                raise InvalidModel(f"{file} has tensor {min(repeated)} again; {_AGAIN}")
            tensors |= part_tensors
        count = metadata.get("split.count", 0)
        if count > 1 and count != len(files):
            raise InvalidModel(
                f"{path} is one of {count} files; give the first, NAME-00001-of-{count:05}.gguf, beside the others"
            )
        promised = metadata.get("split.tensors.count", len(tensors))
        if promised != len(tensors):
            raise InvalidModel(f"{path}: its files have {len(tensors)} tensors, the model has {promised}; {_AGAIN}")
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise InvalidModel(f"{path} names no architecture (general.architecture); give a model in GGUF")
        return cls(path, files, architecture, metadata, tensors)

    @property
    def name(self) -> str:
        """The model's name: that of its file."""
        return model_stem(self.path)

    @property
    def num_layers(self) -> int:
        """The number of layers, without those at the end that predict further tokens."""
        return self.count("block_count") - self.count("nextn_predict_layers", 0)

    def find(self, key: str) -> Any:
        """The value of `ARCHITECTURE.key`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """The number `ARCHITECTURE.key`. Raises InvalidModel if it is no number, or missing without a default."""
        value = self.find(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            problem = "has no" if value is None else f"has the value {value!r} for"
            raise InvalidModel(f"{self.path} {problem} {self.architecture}.{key}, a number of the model; {_AGAIN}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """As `number`, for a whole number."""
        value = self.number(key, default)
        if value != int(value):
            raise InvalidModel(f"{self.path} has {self.architecture}.{key} {value}; it should be a whole number")
        return int(value)

    def tensor(self, name: str) -> GgufTensor:
        """Raises InvalidModel if there is no such tensor."""
        if name not in self.tensors:
            raise InvalidModel(f"{self.path} lacks tensor {name}; {_AGAIN}")
        return self.tensors[name]


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """(metadata, tensors) of one file."""
    size = path.stat().st_size
    if size < 24:
        raise InvalidModel(f"{path} is truncated: it has {size} bytes; {_AGAIN}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise InvalidModel(f"{path} is not a GGUF file: it does not begin with the letters GGUF; {_AGAIN}")
        try:
            return _Header(path, data).read()
        except (struct.error, IndexError, OverflowError, MemoryError):
            raise InvalidModel(f"{path} is truncated: its header is incomplete at {size} bytes; {_AGAIN}") from None
        except UnicodeDecodeError:
            raise InvalidModel(f"{path} has a name or a text that is not UTF-8; {_AGAIN}") from None


class _Header:
    """Reads one header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = len(MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._number("I")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in _VERSIONS
            what = "numbers of big-endian machines" if is_swapped else f"format version {version}"
            raise InvalidModel(f"{self._path} has {what}, which are not read; convert the model to GGUF again")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_entries):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        described = list(self._tensors(num_tensors))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise InvalidModel(f"{self._path} has general.alignment {alignment!r}; {_AGAIN}")
        base = -(-self._at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in described:
            tensor = GgufTensor(name, self._path, kind, shape, base + offset)
            if tensor.start + tensor.nbytes > len(self._data):
                raise InvalidModel(
                    f"{self._path} is truncated: tensor {name} ends at byte {tensor.start + tensor.nbytes:,} of "
                    f"{len(self._data):,}; {_AGAIN}"
                )
            tensors[name] = tensor
        return metadata, tensors

    def _tensors(self, count: int) -> Iterator[tuple[str, GGMLQuantizationType, tuple[int, ...], int]]:
        """(name, type, shape, offset in the data) of each tensor."""
        for _ in range(count):
            name, num_dims = self._text(), self._number("I")
            sizes = self._unpack(f"{min(num_dims, 8)}Q")
            number, offset = self._number("I"), self._number("Q")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise InvalidModel(
                    f"{self._path}: tensor {name} has the type number {number}, which is not known; use a file of "
                    "another type, or install a newer gguf package"
                ) from None
            if not sizes or not all(sizes) or sizes[0] % GGML_QUANT_SIZES[kind][0]:
                raise InvalidModel(f"{self._path}: tensor {name} of type {kind.name} has sizes {list(sizes)}; {_AGAIN}")
            yield name, kind, tuple(reversed(sizes)), offset

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _NUMBERS:
                return list(self._unpack(f"{count}{_NUMBERS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise InvalidModel(f"{self._path} has a metadata entry of the unknown type {kind}; {_AGAIN}")
        value = self._number(_NUMBERS[kind])
        # A float32 as the shortest text that means it: 1e-6, and not 9.999999974752427e-07.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _text(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError
        text = self._data[self._at : end].decode()
        self._at = end
        return text

    def _number(self, form: str) -> Any:
        return self._unpack(form)[0]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values
