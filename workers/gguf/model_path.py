"""find_gguf(): the GGUF file that a user means by a path. Imports neither numpy nor the `gguf` package."""

import re
from pathlib import Path
from typing import Final

from coatcheck.proto.errors import InvalidModel

MAGIC: Final = b"GGUF"
_SPLIT: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # the stem of one of several files
_PROJECTOR: Final = "mmproj"  # begins the names of files with a model's encoder of images
_MOST_LISTED: Final = 8


def find_gguf(model: str) -> Path | None:
    """The GGUF file, or the first file of a split one, that `model` is or that its folder holds alone. None if `model`
    means no GGUF file: a folder with safetensors files is a checkpoint in transformers' format.

    Raises InvalidModel for a folder with several GGUF models and no checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return path if is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(file for file in path.glob("*.gguf") if not file.name.startswith(_PROJECTOR))
    models: dict[str, Path] = {}
    for file in found:  # the first of split files sorts before the others
        models.setdefault(model_stem(file), file)
    if len(models) > 1:
        names = [file.name for file in models.values()]
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        raise InvalidModel(f"{path} holds {len(names)} GGUF models; give one: {', '.join(names[:_MOST_LISTED])}{more}")
    return next(iter(models.values()), None)


def is_gguf(path: Path) -> bool:
    """Whether the path is a file that begins as a GGUF file does, or has such a file's name."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:  # Ollama's files have no ending
        return file.read(len(MAGIC)) == MAGIC


def model_stem(path: Path) -> str:
    """The name of a file without its ending and without its place among several files."""
    stem = path.stem if path.suffix == ".gguf" else path.name
    split = _SPLIT.fullmatch(stem)
    return split[1] if split else stem


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is the first file. Raises InvalidModel for another one, or if one is
    missing."""
    split = _SPLIT.fullmatch(path.stem) if path.suffix == ".gguf" else None
    if split is None:
        return (path,)
    name, number, count = split[1], int(split[2]), int(split[3])
    files = tuple(path.with_name(f"{name}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1))
    if number != 1:
        raise InvalidModel(f"{path} is file {number} of {count}; give the first, {files[0].name}")
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidModel(f"{path.parent} lacks {', '.join(missing[:3])}{more} of this model; fetch it too")
    return files
