"""Finding and reading checkpoint files, and the errors for files that cannot be read."""

import json
import logging
import shutil
import socket
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.router.tiny_tokenizer import write_model
from tests.workers.checkpoints import tiny_checkpoint


def load(path: Path | str, **options: object) -> Model:
    arguments: dict[str, object] = dict(communicator=Communicator(), dtype="auto", device="cpu")
    return load_model(path, **(arguments | options))  # type: ignore[arg-type]  # options vary by test


@pytest.fixture
def copied(checkpoint_directory: Path, tmp_path: Path) -> Path:
    """A llama checkpoint that the test may break."""
    return Path(shutil.copytree(tiny_checkpoint("llama", checkpoint_directory), tmp_path / "llama"))


@pytest.fixture
def sharded(copied: Path) -> Path:
    """A llama checkpoint in several files with an index."""
    AutoModelForCausalLM.from_pretrained(copied).save_pretrained(copied, max_shard_size="100KB")
    (copied / "model.safetensors").unlink(missing_ok=True)
    return copied


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_slices_are_the_tensors_parts(copied: Path) -> None:
    """A read with a slice gives the rows or columns of its ranges, joined in order."""
    with Checkpoint.open(str(copied)) as checkpoint:
        name = "model.layers.0.mlp.gate_proj.weight"
        whole = checkpoint.read(name)
        assert torch.equal(
            checkpoint.read(name, TensorSlice(0, ((8, 16), (40, 48)))), torch.cat((whole[8:16], whole[40:48]))
        )
        assert torch.equal(checkpoint.read(name, TensorSlice(1, ((16, 32),))), whole[:, 16:32])
        assert checkpoint.slice_bytes(name, TensorSlice(1, ((16, 32),))) == whole.nbytes // 4


def test_several_files_are_one_checkpoint(sharded: Path, checkpoint_directory: Path) -> None:
    """Tensors are read from the file that the index names."""
    with Checkpoint.open(str(sharded)) as many, Checkpoint.open(str(checkpoint_directory / "llama")) as one:
        assert len({entry.file for entry in many.entries.values()}) > 1
        assert many.entries.keys() == one.entries.keys()
        assert all(torch.equal(many.read(name), one.read(name)) for name in one.entries)


def test_fingerprint_follows_the_weights(copied: Path) -> None:
    """The same weights in other files have the same fingerprint. One changed tensor or setting has another."""

    def fingerprint() -> str:
        with Checkpoint.open(str(copied)) as checkpoint:
            return checkpoint.fingerprint()

    first = fingerprint()
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, copied / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, copied / "b.safetensors")
    assert fingerprint() == first
    save_file({name: tensors[name] * (1 + (name == names[2])) for name in names[::2]}, copied / "a.safetensors")
    changed = fingerprint()
    assert changed != first
    edit_config(copied, rope_theta=500.0)
    assert fingerprint() not in (first, changed)


def test_progress_ends_at_the_total(copied: Path) -> None:
    """Progress rises to the bytes that this rank reads, and has this total from the first call on."""
    seen: list[tuple[int, int]] = []
    model = load(copied, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {model.spec.weight_bytes} == {seen[-1][0]}


def test_unused_tensors_are_told(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A config with fewer layers than the checkpoint is served, and a warning is logged."""
    edit_config(copied, num_hidden_layers=2)
    assert len(load(copied).spec.layers) == 2
    assert "9 tensors are not used, the first is model.layers.2.input_layernorm.weight" in caplog.text


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint whose config.json ties the head to the embedding, and which stores the embedding alone."""
    return tiny_checkpoint("llama3-rope", tmp_path)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def add_other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def add_equal_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def keep_head_alone(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize(("edit", "warns"), [(add_other_head, True), (add_equal_head, False), (keep_head_alone, False)])
def test_a_stored_head_counts_although_config_json_ties_it(
    edit: Callable[[dict[str, torch.Tensor]], None], warns: bool, tied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: a head that differs from the embedding is used, and one of the two tensors is enough."""
    edit_tensors(tied, edit)
    check_checkpoint(ServeConfig.build({"model": str(write_model(tied))}))
    with caplog.at_level(logging.WARNING):
        model = load(tied, dtype="float32")
    assert ("the stored tensors differ; both are used" in caplog.text) == warns
    prompt = list(range(5, 25))
    reference = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    driver = PagedDriver(model)
    found = driver.step([(driver.add_sequence(prompt, 1), len(prompt))])[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_end_tokens_come_from_the_generation_config(copied: Path) -> None:
    """If generation_config.json names several end tokens, each of them ends a sequence."""
    assert load(copied).spec.eos_token_ids == (2,)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load(copied).spec.eos_token_ids == (2, 7)


def test_auto_dtype_is_the_configs(copied: Path) -> None:
    """`auto` is the dtype of the config. Another dtype can be set."""
    assert load(copied).spec.dtype == "float32"
    edit_config(copied, dtype="bfloat16")
    assert load(copied).spec.dtype == "bfloat16"
    assert load(copied, dtype="float32").spec.dtype == "float32"


def truncate(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:50])


def no_weights(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    (path / "pytorch_model.bin").touch()


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def integer_weights(path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


def lost_tensor(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))


def other_shape(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}))


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Damage to a file's header; `change` returns the header to write."""

    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        changed = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
        file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])

    return damage


def config(**changes: object) -> Callable[[Path], None]:
    """Damage to config.json."""
    return lambda path: edit_config(path, **changes)


def write(name: str, text: str) -> Callable[[Path], None]:
    """A file with this content."""

    def damage(path: Path) -> None:
        (path / name).write_text(text)

    return damage


def weights_in_a_directory(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()


INDEX = "model.safetensors.index.json"
BROKEN = [
    (header(lambda entries: [1]), "does not describe tensors"),
    (header(lambda entries: entries | {"x": 5}), "does not describe tensors"),
    (header(lambda entries: entries | {"x": {"dtype": "F32", "shape": [1]}}), "does not describe tensors"),
    (
        header(lambda entries: entries | {"x": {"dtype": "F32", "shape": [1], "data_offsets": ["a", 4]}}),
        "does not describe tensors",
    ),
    (write(INDEX, "{}"), "does not map tensors"),
    (write(INDEX, '{"weight_map": ["a"]}'), "does not map tensors"),
    (write(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'), "does not map tensors"),
    (weights_in_a_directory, "no safetensors file"),
    (config(dtype="zorp"), "config.json: .*zorp"),
    (config(hidden_size="big"), "config.json: .*hidden_size"),
    (config(num_attention_heads=0), "config.json: "),
    (config(num_hidden_layers=0), "num_hidden_layers 0"),
    (config(model_type="own", auto_map={"AutoConfig": "own.Config"}), "config.json: .*custom code"),
    (write("generation_config.json", "["), "generation_config.json (is not valid JSON|does not hold a JSON object)"),
    (write("generation_config.json", "[]"), "generation_config.json (is not valid JSON|does not hold a JSON object)"),
    (write("generation_config.json", '{"eos_token_id": "end"}'), "eos_token_id is 'end'"),
    (truncate, "truncated"),
    (truncate_header, "truncated"),
    (no_weights, "no safetensors file"),
    (no_config, "has no config.json"),
    (integer_weights, "stored as I8; only F32, BF16, F16"),
    (lost_tensor, "lacks model.layers.1.mlp.up_proj.weight"),
    (other_shape, "do not belong together"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_broken_checkpoint_is_refused(damage: Callable[[Path], None], message: str, copied: Path) -> None:
    """A damaged checkpoint is refused, and the message says what is wrong and where."""
    damage(copied)
    with pytest.raises(InvalidModel, match=message):
        load(copied)


def test_missing_shard_is_named(sharded: Path) -> None:
    """A shard that the index names and the directory lacks is named in the refusal."""
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(InvalidModel, match=lost.name):
        load(sharded)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "no such model"])
def test_missing_directory_is_refused(path: str) -> None:
    """A path that is no directory and no model id is refused without a request to the hub.

    The message names the host, because the model may be mounted on other hosts.
    """
    with pytest.raises(InvalidModel, match=f"no model directory {path} on {socket.gethostname()}.* mounted or copied"):
        load(path)


@pytest.mark.parametrize("hub_id", ["somebody/tiny-llama", "tiny-llama"])
def test_hub_id_is_found_in_the_local_cache(
    hub_id: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model id is found in the hub client's cache, also an id without an owner, such as gpt2."""
    repository = tmp_path / "cache" / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(copied, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with Checkpoint.open(hub_id) as checkpoint:
        assert checkpoint.name == hub_id
        assert checkpoint.config["model_type"] == "llama"


def test_hub_id_that_gives_nothing_is_refused() -> None:
    """The error contains the message of the hub's client, which refuses this id without a request, and no traceback of
    that client."""
    with pytest.raises(
        InvalidModel, match="is no directory, and cannot be downloaded from the hub: Cannot have -- or .. in repo_id"
    ) as refused:
        load("nobody/never--was")
    assert "huggingface_hub" not in "".join(traceback.format_exception(refused.value))


def test_longer_than_the_model_is_refused(copied: Path) -> None:
    """A max_model_len above the model's own is refused. A shorter one is accepted."""
    assert load(copied).spec.max_model_len == 256
    assert load(copied, max_model_len=100).spec.max_model_len == 100
    with pytest.raises(InvalidConfig, match="max-model-len is 257, but the model supports 256"):
        load(copied, max_model_len=257)


def test_unknown_dtype_is_refused(copied: Path) -> None:
    """A dtype that is not served is refused, and the message names the served ones."""
    with pytest.raises(InvalidConfig, match="use auto, float32, bfloat16, float16"):
        load(copied, dtype="int4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="no_such_model"), "no_such_model"),
        (dict(quantization_config=dict(quant_method="hqq")), "quantised with 'hqq', which is not served"),
        (dict(model_type="recurrent_gemma"), "cannot be served"),
        (dict(model_type="t5", is_encoder_decoder=True), "encoder-decoder"),
    ],
    ids=["unknown", "quantised", "recurrent", "t5"],
)
def test_architecture_that_we_cannot_serve_is_refused(changes: dict[str, object], message: str, copied: Path) -> None:
    """An architecture is refused before its weights are read, with the reason."""
    edit_config(copied, **changes)
    with pytest.raises(InvalidModel, match=message):
        load(copied)
