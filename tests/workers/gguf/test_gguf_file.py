"""Headers of GGUF files: metadata, tensors, split files, and one clear error for each kind of broken file."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.converter import Conversion
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.model_path import find_gguf, model_stem
from tests.workers.gguf.gguf_files import finish
from tests.workers.gguf.gguf_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"), gguf.GGMLQuantizationType.Q8_0)[0]


def changed(model: Path, folder: Path, change: Callable[[bytearray], object]) -> Path:
    """A copy of the file whose bytes `change` has changed."""
    data = bytearray(model.read_bytes())
    change(data)
    copy = folder / "broken.gguf"
    copy.write_bytes(data)
    return copy


def replace_bytes(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        place = data.index(old)
        data[place : place + len(old)] = new

    return change


def type_number(name: bytes, number: int) -> Callable[[bytearray], None]:
    """Give a matrix another type."""

    def change(data: bytearray) -> None:
        place = data.index(name) + len(name) + 4 + 16
        data[place : place + 4] = struct.pack("<I", number)

    return change


def test_metadata_and_tensors_are_those_of_the_package(model: Path) -> None:
    """Every value, and the place of every tensor."""
    file, reader = GgufFile.open(model), gguf.GGUFReader(model)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(file.metadata) == keys
    for key in keys:
        assert file.metadata[key] == pytest.approx(reader.fields[key].contents())
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = file.tensors[tensor.name]
        assert (found.type, found.start) == (tensor.tensor_type, tensor.data_offset)
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert found.read_rows().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace_bytes(b"GGUF", b"GGML"), "is not a GGUF file: it does not begin with the letters GGUF"),
        (lambda data: data.__delitem__(slice(10, None)), "is truncated: it has 10 bytes"),
        (lambda data: data.__delitem__(slice(3000, None)), "is truncated: its header is incomplete at 3000 bytes"),
        (lambda data: data.__delitem__(slice(-100, None)), "is truncated: tensor "),
        (replace_bytes(struct.pack("<I", 3), struct.pack("<I", 1)), "has format version 1"),
        (replace_bytes(struct.pack("<I", 3), struct.pack(">I", 3)), "has numbers of big-endian machines"),
        (type_number(b"blk.0.attn_q.weight", 77), "blk.0.attn_q.weight has the type number 77, which is not known"),
        (type_number(b"blk.0.attn_q.weight", 15), "tensor blk.0.attn_q.weight has the type Q8_K, which is not read"),
        (replace_bytes(b"blk.1.ffn_up.weight", b"blk.0.ffn_uq.weight"), "lacks tensor blk.1.ffn_u"),
        (
            replace_bytes(b"output.weight", b"outxxx.weight"),
            "has tensor outxxx.weight, which llama models of this size",
        ),
        (replace_bytes(b"llama.block_count", b"llama.block_xxxxx"), "has no llama.block_count, a number of the model"),
        (replace_bytes(b"general.architecture", b"general.architectxxx"), "names no architecture"),
        (replace_bytes(b"token_embd.weight", b"token_embx.weight"), "lacks tensor token_embd.weight"),
        (replace_bytes(b"output_norm.weight", b"output_norx.weight"), "lacks tensor output_norm.weight"),
    ],
)
def test_a_broken_file_is_one_error(
    model: Path, tmp_path: Path, change: Callable[[bytearray], object], words: str
) -> None:
    """It names the file, and what to do."""
    with pytest.raises(InvalidModel) as error:
        Conversion.plan(changed(model, tmp_path, change))
    assert words in str(error.value) and "broken.gguf" in str(error.value) and "\n" not in str(error.value)


def test_no_cut_of_a_file_crashes(model: Path, tmp_path: Path) -> None:
    """Wherever a header ends too early, the error is InvalidModel."""
    header = GgufFile.open(model)
    end = min(tensor.start for tensor in header.tensors.values())
    data = model.read_bytes()
    for length in range(0, end, 97):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(InvalidModel, match="is truncated"):
            GgufFile.open(tmp_path / "cut.gguf")


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    """The error names it, and those that are served."""
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(InvalidModel, match="has the architecture bert, which is not served from GGUF; served are"):
        Conversion.plan(tmp_path / "bert.gguf")


def split(folder: Path) -> list[Path]:
    """A model in three files."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
    for index in range(3):
        writer.add_tensor(f"tensor.{index}", np.full((2, 32), index, np.float32))
    finish(writer)
    return sorted(folder.glob("model-*.gguf"))


def test_a_split_model_is_one(tmp_path: Path) -> None:
    """The first file stands for all of them; metadata are its own."""
    files = split(tmp_path)
    assert len(files) == 3
    file = GgufFile.open(files[0])
    assert sorted(file.tensors) == ["tensor.0", "tensor.1", "tensor.2"] and file.name == "model"
    assert file.tensor("tensor.2").read_rows().view(np.float32).max() == 2
    assert find_gguf(str(tmp_path)) == files[0]


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    """A part that is not the first, a missing one, and one that was renamed."""
    first, second, third = split(tmp_path)
    with pytest.raises(InvalidModel, match="is file 2 of 3; give the first, model-00001-of-00003.gguf"):
        GgufFile.open(second)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(InvalidModel, match="is one of 3 files; give the first"):
        GgufFile.open(tmp_path / "renamed.gguf")
    (tmp_path / "renamed.gguf").rename(first)
    third.unlink()
    with pytest.raises(InvalidModel, match="lacks model-00003-of-00003.gguf of this model; fetch it too"):
        GgufFile.open(first)


def test_the_file_that_a_path_means(tmp_path: Path) -> None:
    """A file by its name or its first bytes, a folder with one model beside its encoder of images; never a folder with
    safetensors files."""
    assert find_gguf(str(tmp_path)) is None and find_gguf("org/model") is None
    one = tmp_path / "a-Q4_K_M.gguf"
    one.write_bytes(b"GGUF")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert find_gguf(str(one)) == find_gguf(str(tmp_path)) == one
    (tmp_path / "sha256-123").write_bytes(b"GGUF")
    assert find_gguf(str(tmp_path / "sha256-123")) is not None
    (tmp_path / "notes.txt").write_text("GG")
    assert find_gguf(str(tmp_path / "notes.txt")) is None
    (tmp_path / "a-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match="holds 2 GGUF models; give one: a-Q4_K_M.gguf, a-Q8_0.gguf"):
        find_gguf(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(str(tmp_path)) is None


def test_the_name_of_a_model() -> None:
    """That of its file, without the place among several files."""
    assert model_stem(Path("/m/Qwen3-0.6B-Q8_0.gguf")) == "Qwen3-0.6B-Q8_0"
    assert model_stem(Path("/m/big-00001-of-00012.gguf")) == "big"
    assert model_stem(Path("/m/sha256-12.5")) == "sha256-12.5"
