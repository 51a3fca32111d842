"""The names of transformers' models, kept in a file: the same names, and never those of other files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.workers.host.model_names import Names, read_names

_NAMES: Names = {frozenset(): {"a.b": {"C", "D"}}, frozenset({"torch", "vision"}): {"a.c": {"E"}}}
_PRINT = """
import hashlib, transformers, transformers.models
for package in (transformers, transformers.models):
    names = [sorted(package._class_to_module.items()), sorted(package.__all__)]
    print(hashlib.md5(repr(names).encode()).hexdigest())
from transformers.models.llama import LlamaForCausalLM
from transformers.utils.import_utils import define_import_structure
print(hasattr(define_import_structure, "__self__"))
"""
_FAST = "from coatcheck.workers.host.fast_imports import import_transformers; import_transformers()"


class Listing:
    """Lists the names, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Names:
        self.count += 1
        return _NAMES


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one model, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "a" / "b.py").write_text("C = D = 1")
    return tmp_path / "models"


def test_names_are_listed_once(models: Path) -> None:
    """A second process gets the names of the first."""
    listing = Listing()
    assert read_names(models, listing) == read_names(models, listing) == _NAMES
    assert listing.count == 1


@pytest.mark.parametrize("change", ["content", "file", "folder"])
def test_a_changed_folder_is_listed_again(models: Path, change: str, tmp_path: Path) -> None:
    """Another file, another content, or the same files in another folder are not those of the list."""
    listing = Listing()
    read_names(models, listing)
    if change == "content":
        os.utime(models / "a" / "b.py", ns=(1, 1))
    elif change == "file":
        (models / "a" / "c.py").touch()
    else:
        models = models.rename(tmp_path / "others")
    read_names(models, listing)
    assert listing.count == 2
    read_names(models, listing)
    assert listing.count == 2


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', "\0", '{"key": "KEY", "names": 3}', '{"key": "KEY"}'])
def test_a_damaged_file_is_replaced(models: Path, tmp_path: Path, text: str) -> None:
    """A file that has no names is written again."""
    listing = Listing()
    read_names(models, listing)
    file = tmp_path / "cache" / "coatcheck" / "model_names.json"
    file.write_text(text.replace("KEY", json.loads(file.read_text())["key"]))
    assert read_names(models, listing) == _NAMES
    assert read_names(models, listing) == _NAMES and listing.count == 2


def test_names_are_found_without_a_cache(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no file can be written, each process lists the names."""
    listing = Listing()
    (tmp_path / "taken").touch()
    for cache in (tmp_path / "taken", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        assert read_names(models, listing) == _NAMES
    assert listing.count == 2 and not Path("relative").exists()


def test_transformers_has_the_same_names(tmp_path: Path) -> None:
    """`transformers` and `transformers.models` export what they export without the file, when it is written and when it
    is read. Afterwards transformers' function is its own again."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    printed = [
        subprocess.run(
            [sys.executable, "-c", f"{first}\n{_PRINT}"], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for first in ("", _FAST, _FAST)
    ]
    assert printed[0] == printed[1] == printed[2] and printed[0].endswith("False\n")
    assert len(list((tmp_path / "coatcheck").iterdir())) == 1
