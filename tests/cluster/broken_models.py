"""The files of a small local model, made without torch, and functions that break one of them."""

import json
import math
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
NULL = object()


def whole_model(directory: Path) -> Path:
    """config.json, a tokenizer, and a llama's tensors in two shards with an index."""
    write_model(directory)
    edit_config(directory, **CONFIG)
    tensors = list(llama_tensors().items())
    shards: dict[str, Any] = {}
    for number, part in ((1, tensors[:10]), (2, tensors[10:])):
        write_shard(directory / f"model-{number}.safetensors", dict(part))
        shards |= {name: f"model-{number}.safetensors" for name, _ in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return directory


def llama_tensors() -> dict[str, tuple[int, ...]]:
    """The shapes of CONFIG's tensors, by name."""
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv_rows = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_rows, hidden), "self_attn.v_proj": (kv_rows, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes a field."""
    file = directory / "config.json"
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def set_fields(directory: Path, changes: dict[str, Any]) -> None:
    """Sets fields of config.json, to null where the value is NULL."""
    file = directory / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: None if value is NULL else value for name, value in values.items()}))


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32", itemsize: int = 4) -> None:
    """A safetensors file of tensors full of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))


def lose_shard(directory: Path) -> None:
    (directory / "model-2.safetensors").unlink()


def truncate_shard(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lengthen_shard(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    file.write_bytes(file.read_bytes() + b"more")


def lengthen_header(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2 * len(content)) + content[8:])


def truncate_header(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def map_tensor_to(directory: Path, file: str | list[str]) -> None:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))


def write(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)


def truncate_tokenizer(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])


def fill_shard_with_garbage(directory: Path) -> None:
    (directory / "model-2.safetensors").write_bytes(b"<!DOCTYPE html><title>404</title>")


def leave_pointer(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 128\n"
    (directory / "model-2.safetensors").write_text(pointer)


def lie_in_header(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    write_shard(file, {"a": (8, 4)})
    file.write_bytes(file.read_bytes().replace(b"[8, 4]", b"[9, 4]"))


def store_in_eight_bits(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    write_shard(directory / "model.safetensors", llama_tensors(), dtype="F8_E4M3", itemsize=1)


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


def copy_model(model: Path, directory: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(model, directory / "model"))
