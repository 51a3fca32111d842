"""The names that transformers' models export, kept in a file on this host. Imports neither torch nor transformers.

When transformers is imported it reads the source of each of its 1,700 model files for these names, once in
`transformers` and once in `transformers.models`. Each time takes 0.45 s of the 3.5 s in which a rank imports its
libraries (bench/LOG.md). `with keep_model_names():` around the import has it read them from
$XDG_CACHE_HOME/coatcheck/model_names.json (by default ~/.cache), unless a model file has changed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from coatcheck.workers.host.user_cache import user_cache, write_whole

# What transformers calls an import structure: required packages -> module -> names.
Names = dict[frozenset[str], dict[str, set[str]]]

_MODULE: Final = "transformers.utils.import_utils"
_FUNCTION: Final = "define_import_structure"
_NO_FOLDER: Final = Path(os.devnull)  # for a user without a home: a file below it cannot exist


@contextmanager
def keep_model_names() -> Iterator[None]:
    """While inside, an import of transformers takes the names of its models from the file, or writes the file."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()


def read_names(models: Path, list_names: Callable[[], Names]) -> Names:
    """The names in the files of the folder `models`, from the file of this host, or else from `list_names`.

    If the file cannot be written, the next process lists the names too.
    """
    file, key = (user_cache() or _NO_FOLDER) / "model_names.json", _hash_files(models)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return {
                frozenset(packages): {module: set(names) for module, names in modules.items()}
                for packages, modules in kept["names"]
            }
    names = list_names()
    with suppress(OSError):
        write_whole(file, json.dumps({"key": key, "names": _as_lists(names)}))
    return names


class _Finder(MetaPathFinder):
    """Replaces transformers' define_import_structure by a function that calls `read_names`, once its module is
    imported."""

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._function: Callable[..., Names] | None = None
        self._names: Names | None = None  # of all models

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(spec.loader, self._replace)
        return spec

    def restore(self) -> None:
        """Give the module its function back."""
        if self._module is not None:
            setattr(self._module, _FUNCTION, self._function)

    def _replace(self, module: ModuleType) -> None:
        self._module, self._function = module, getattr(module, _FUNCTION)
        setattr(module, _FUNCTION, self._list_names)

    def _list_names(self, path: str | os.PathLike[str], prefix: str | None = None) -> Names:
        """What define_import_structure returns for `path`, a folder or its __init__.py. `prefix`: goes before the names
        of modules."""
        list_names = self._function
        assert self._module is not None and list_names is not None
        models = Path(self._module.__file__ or "").parents[1] / "models"
        if Path(path) not in (models, models / "__init__.py"):
            return list_names(path, prefix)
        if self._names is None:
            self._names = read_names(models, lambda: list_names(models))
        return {
            packages: {f"{prefix}.{module}" if prefix else module: set(names) for module, names in modules.items()}
            for packages, modules in self._names.items()
        }


class _Loader(SourceFileLoader):
    """Calls `change` with the module after its code has run."""

    def __init__(self, loader: SourceFileLoader, change: Callable[[ModuleType], None]) -> None:
        super().__init__(loader.name, loader.path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


def _hash_files(models: Path) -> str:
    """A hash of the path, size and time of each source file in the folder."""
    return hashlib.blake2b("\n".join(sorted(_describe_files(models))).encode(), digest_size=16).hexdigest()


def _describe_files(folder: Path | str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _describe_files(entry.path)
            elif entry.name.endswith(".py"):
                about = entry.stat()
                yield f"{entry.path} {about.st_size} {about.st_mtime_ns}"


def _as_lists(names: Mapping[frozenset[str], Mapping[str, set[str]]]) -> list[Any]:
    return [
        [sorted(packages), {module: sorted(found) for module, found in modules.items()}]
        for packages, modules in names.items()
    ]
