"""Each GGUF file is converted once; a conversion that ends midway leaves nothing that is used."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf.constants import GGMLQuantizationType as Type

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.conversion_cache import cached_directory, convert
from coatcheck.workers.gguf.converter import Conversion
from tests.workers.gguf.gguf_models import write_model

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
# Converts argument 1 into argument 2, and stops for ever at the first piece of the weights.
_HANGS = """
import sys, time
from pathlib import Path
from coatcheck.workers.gguf.conversion_cache import convert

def stop(done, total):
    print("converting", flush=True)
    time.sleep(3600)

convert(Path(sys.argv[1]), Path(sys.argv[2]), "auto", stop)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"), Type.Q8_0)[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_has_one_folder_until_it_changes(model: Path, tmp_path: Path, cache: Path) -> None:
    """Named as the file is. Another dtype, size or time of change is another folder."""
    file = Path(shutil.copy2(model, tmp_path / "tiny-Q8_0.gguf"))
    folder = cached_directory(file, "auto")
    assert folder.name == "tiny-Q8_0" and folder.is_relative_to(cache / "coatcheck" / "gguf")
    assert cached_directory(file, "auto") == folder != cached_directory(file, "float32")
    os.utime(file, ns=(0, 1))
    assert cached_directory(file, "auto") != folder


def test_without_a_home_there_is_no_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to set, and which command needs no cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(InvalidModel, match="set XDG_CACHE_HOME, or use `coatcheck convert`"):
        cached_directory(model, "auto")


def test_a_conversion_writes_everything_and_reports_its_progress(model: Path, tmp_path: Path) -> None:
    """The last report says that all is done. The folder has no draft beside it."""
    out, reports = tmp_path / "made" / "out", []
    convert(model, out, "auto", lambda done, total: reports.append((done, total)))
    assert {file.name for file in out.iterdir()} == FILES | {"chat_template.jinja"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1]
    assert (out / "model.safetensors").stat().st_size > reports[-1][1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_conversion_is_done_again(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """What is left of it is never taken for the model, and is deleted by the next conversion."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", _HANGS, str(model), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "converting\n"
        assert not out.exists() and any((tmp_path / ".out.draft").iterdir())
        process.send_signal(number)
        process.wait(MAX_WAIT_SECONDS)
    assert not out.exists()
    convert(model, out, "auto")
    assert {file.name for file in out.iterdir()} >= FILES and not (tmp_path / ".out.draft").exists()


def test_a_conversion_that_fails_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the disk becomes one line."""

    def fail(self: Conversion, directory: Path, progress: object) -> None:
        (directory / "config.json").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Conversion, "write", fail)
    with pytest.raises(InvalidModel, match="cannot be converted into .*out: No space left on device; give another"):
        convert(model, tmp_path / "out", "auto")
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how much is needed, and which earlier conversions can be deleted."""
    folder = cached_directory(model, "float32")
    convert(model, folder, "float32")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(InvalidModel) as error:
        convert(model, tmp_path / "out", "auto")
    assert "takes 6" in str(error.value) and "has 1 MiB free" in str(error.value)
    assert f"earlier conversions can be deleted: {folder.parent} (" in str(error.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.draft").exists()


def _convert_once(model: str, out: str, log: str) -> None:
    def report(done: int, total: int) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.01)

    convert(Path(model), Path(out), "auto", report)


def test_of_two_processes_one_converts(model: Path, tmp_path: Path) -> None:
    """The other waits, and finds the folder."""
    out, log = tmp_path / "out", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_convert_once, args=(str(model), str(out), str(log))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MAX_WAIT_SECONDS)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(set(log.read_text().split())) == 1
    assert {file.name for file in out.iterdir()} >= FILES
