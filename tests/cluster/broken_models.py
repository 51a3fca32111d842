"""The files of a small local model, made without torch, and functions that break one of them."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from tests.router.tiny_tokenizer import write_model

CONFIG: dict[str, Any] = dict(
    model_type="llama",
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    hidden_size=64,
    intermediate_size=100,
    vocab_size=600,
    max_position_embeddings=256,
    dtype="float32",
)


def whole_model(directory: Path) -> Path:
    """config.json, a tokenizer, and two shards with an index, of one tensor each: everything that is checked before Ray
    starts."""
    write_model(directory)
    edit_config(directory, **CONFIG)
    for number in (1, 2):
        write_shard(directory / f"model-{number}.safetensors", f"model.layers.{number - 1}.weight")
    shards = {f"model.layers.{number - 1}.weight": f"model-{number}.safetensors" for number in (1, 2)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes a field."""
    file = directory / "config.json"
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def write_shard(file: Path, name: str, dtype: str = "F32", shape: tuple[int, ...] = (8, 4), size: int = 128) -> None:
    """A safetensors file of one tensor; its header promises `size` bytes."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def lose_shard(directory: Path) -> None:
    (directory / "model-2.safetensors").unlink()


def truncate_shard(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def fill_shard_with_garbage(directory: Path) -> None:
    (directory / "model-2.safetensors").write_bytes(b"<!DOCTYPE html><title>404</title>")


def leave_pointer(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 128\n"
    (directory / "model-2.safetensors").write_text(pointer)


def lie_in_header(directory: Path) -> None:
    write_shard(directory / "model-2.safetensors", "model.layers.1.weight", shape=(9, 4))


def store_in_eight_bits(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    write_shard(directory / "model.safetensors", "model.layers.0.weight", dtype="F8_E4M3", size=32)


def keep_a_pickle_alone(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"PK")


def make_a_shard_a_folder(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "model.safetensors").mkdir()


def lose_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def break_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')


def break_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")


def break_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def lose_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def copy_model(model: Path, directory: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(model, directory / "model"))
