"""GGUF files as models of the commands: `serve`, `convert`, `plan`, `verify`, `doctor` and `LLM`."""

import json
import os
import shutil
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

import coatcheck
from coatcheck.cluster.config.gguf_model import with_converted_model
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.model import check_model, check_model_directory
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf import stale_conversions
from tests.cluster.command_line import run_here
from tests.workers.gguf.gguf_models import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a GGUF file alone in its folder, a checkpoint with its weights)"""
    folder = tmp_path_factory.mktemp("models")
    path, plain = write_model("llama", folder, Type.Q8_0)
    alone = folder / "alone"
    alone.mkdir()
    return Path(shutil.move(path, alone / "tiny-Q8_0.gguf")), plain


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_serve_takes_the_file_and_its_folder(models: tuple[Path, Path], cache: Path) -> None:
    """Both are converted to the same directory, which has the file's name and passes every check of files."""
    path, _ = models
    configs = [with_converted_model(ServeConfig.build({"model": str(given)})) for given in (path, path.parent)]
    assert configs[0] == configs[1] and configs[0].model_name == "tiny-Q8_0"
    assert Path(configs[0].model).is_relative_to(cache)
    for check in (check_model_directory, check_model, check_checkpoint):
        check(configs[0])
    named = with_converted_model(ServeConfig.build({"model": str(path), "served_model_name": "mine"}))
    assert named.model_name == "mine"


def test_the_conversion_of_a_replaced_file_is_deleted(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line about it; not while the process that made the conversion runs."""
    path = Path(shutil.copy2(models[0], tmp_path / "tiny.gguf"))
    old = []
    for at in (1, 2):
        os.utime(path, ns=(at, at))
        old.append(Path(with_converted_model(ServeConfig.build({"model": str(path)})).model))
    assert all(directory.is_dir() for directory in old) and "deleted" not in capsys.readouterr().err
    while stale_conversions._held:  # as if the process ended
        os.close(stale_conversions._held.popitem()[1])
    os.utime(path, ns=(3, 3))
    new = Path(with_converted_model(ServeConfig.build({"model": str(path)})).model)
    assert "deleted earlier conversions of tiny.gguf, which freed" in capsys.readouterr().err
    assert not any(directory.exists() for directory in old) and new.is_dir()


def test_other_models_are_unchanged(models: tuple[Path, Path]) -> None:
    """Directories and model ids."""
    for model in (str(models[1]), "org/model", "/no/such/folder"):
        config = ServeConfig.build({"model": model})
        assert with_converted_model(config) is config


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match="a.gguf is truncated"):
        with_converted_model(ServeConfig.build({"model": str(tmp_path / "a.gguf")}))
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_convert_writes_a_directory(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The command says where; an existing directory is never overwritten."""
    out = tmp_path / "out"
    done = run_here("convert", str(models[0]), str(out), "--dtype", "float32")
    assert (done.code, done.out) == (0, f"wrote {out}\n"), done.err
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    again = run_here("convert", str(models[0]), str(out))
    assert again.code == 2 and "exists; give a directory that does not exist, or an empty one" in again.err
    other = run_here("convert", str(models[1]), str(tmp_path / "other"))
    assert other.code == 2 and "is no GGUF file, and no folder with one" in other.err


def test_plan_reads_the_header_alone(models: tuple[Path, Path], cache: Path) -> None:
    """Its figures are those of the converted directory."""
    planned = run_here("plan", str(models[0]), "--json", "--device", "cpu")
    assert planned.code == 0, planned.err
    assert not cache.exists()
    config = with_converted_model(ServeConfig.build({"model": str(models[0])}))
    converted = run_here("plan", config.model, "--json", "--device", "cpu")
    assert json.loads(planned.out) == json.loads(converted.out)


def test_verify_and_doctor_read_the_header_alone(models: tuple[Path, Path], cache: Path) -> None:
    """`verify` compares a small copy as it does for a config.json."""
    done = run_here("verify", str(models[0]), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) | {"verified": True, "model_type": "llama", "model": "tiny-Q8_0"} == json.loads(
        done.out
    )
    checked = run_here("doctor", str(models[0]), "--json")
    (finding,) = (one for one in json.loads(checked.out) if one["check"] == "model")
    assert finding["found"] == "tiny-Q8_0 can be converted from tiny-Q8_0.gguf"
    assert not (cache / "coatcheck" / "gguf").exists()


def test_llm_generates_from_the_file(models: tuple[Path, Path]) -> None:
    """The tokens of the same weights in a checkpoint."""
    path, plain = models
    tokens = []
    for model in (path, with_tokenizer(plain, path)):
        llm = coatcheck.LLM(model, dtype="float32", kv_memory=float(8 << 20), max_num_seqs=2)
        (result,) = llm.generate([[5, 6, 7, 8]], max_tokens=8, temperature=0, ignore_eos=True)
        tokens.append(list(result.token_ids))
    assert tokens[0] == tokens[1]


def with_tokenizer(plain: Path, path: Path) -> Path:
    """The checkpoint with the tokenizer of the GGUF file."""
    converted = Path(with_converted_model(ServeConfig.build({"model": str(path)})).model)
    shutil.copyfile(converted / "tokenizer.json", plain / "tokenizer.json")
    return plain
