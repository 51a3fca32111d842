"""The house rules that a reader relies on, kept by reading the sources: arrows, names, lengths, packages."""

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import source_files

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "kernels", "workers", "router", "cluster")
MAY_IMPORT = {
    "proto": set(),
    "kernels": set(),
    "workers": {"kernels", "proto"},
    "router": {"proto"},
    "cluster": {"kernels", "proto", "router", "workers"},
}
# Libraries that a room must not know, wherever in a file they are imported, and the files that may.
FORBIDDEN = [
    ("proto", {"torch", "ray", "transformers"}, set()),
    ("kernels", {"ray", "grpc", "transformers"}, set()),
    ("workers", {"ray"}, {"workers/actor.py"}),
    ("router", {"torch"}, set()),
    ("router", {"ray"}, {"router/actor.py"}),
]


def sources(*rooms: str) -> list[Path]:
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]
    return [file for file in files if "_pb2" not in file.name]


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import in a file, those inside functions too."""
    package = ("coatcheck", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from .. import workers` names a room after the import.
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "coatcheck" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize("room", ROOMS)
def test_arrows(room: str) -> None:
    """A room imports itself and the rooms below it, never one beside or above it."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources(room)
        for line, module in imports(file)
        if (target := room_of(module)) and target != room and target not in MAY_IMPORT[room]
    ]
    assert wrong == []


@pytest.mark.parametrize(("room", "libraries", "allowed"), FORBIDDEN)
def test_libraries_a_room_does_not_know(room: str, libraries: set[str], allowed: set[str]) -> None:
    """A library that a room must not know is imported by none of its files, not even lazily."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources(room)
        if str(file.relative_to(ROOT)) not in allowed
        for line, module in imports(file)
        if module.split(".")[0] in libraries
    ]
    assert wrong == []


def test_front_door_loads_without_torch() -> None:
    """Importing every file of the router brings in neither torch nor transformers; only its actor brings in Ray."""
    files = [file.relative_to(ROOT).with_suffix("") for file in sources("router") if file.name != "actor.py"]
    modules = [".".join(("coatcheck", *file.parts)) for file in files]
    program = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_drawer_files() -> None:
    """A file is named after its noun, so none is called utils, common, helpers or types."""
    drawers = {"utils.py", "common.py", "helpers.py", "types.py"}
    files = sources(*ROOMS, "tests", "bench", "demo")
    assert [str(file.relative_to(ROOT)) for file in files if file.name in drawers] == []


def test_rooms_are_not_packages_with_init() -> None:
    """Rooms are namespace packages: none has an __init__.py that could re-export."""
    assert [room for room in ROOMS if (ROOT / room / "__init__.py").exists()] == []


def test_files_stay_readable() -> None:
    """No file is longer than 350 lines; past 250 it should be split."""
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources(*ROOMS, "bench")}
    assert {name: length for name, length in lengths.items() if length > 350} == {}


def test_modules_say_what_they_do() -> None:
    """Every module of the rooms opens with a docstring."""
    files = sources(*ROOMS, "bench", "demo")
    assert [str(file.relative_to(ROOT)) for file in files if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_tests_open_with_a_sentence() -> None:
    """Every test function begins with a docstring that is a sentence of behaviour."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sources("tests")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if not (ast.get_docstring(node) or "").rstrip().endswith(".")
    ]
    assert wrong == []


def test_editable_install_sees_every_room() -> None:
    """In the editable install each room's files import under the package's name."""
    import coatcheck

    assert Path(coatcheck.__file__).parent == ROOT
    program = "import importlib.util as u; print([r for r in {!r} if u.find_spec('coatcheck.' + r) is None])"
    done = subprocess.run([sys.executable, "-c", program.format(ROOMS)], capture_output=True, text=True, cwd="/")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_wheel_holds_every_room(tmp_path: Path) -> None:
    """A wheel of the repository's own files, built without a C compiler, holds the sources, the .proto files, the type
    marker, and no module beside them."""
    copy = tmp_path / "source"
    for file in source_files():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((ROOT / file).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    environment = {**os.environ, "CC": "false"}
    done = subprocess.run([*command, "-w", tmp_path, copy], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("coatcheck-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = [file for room in ROOMS for suffix in ("*.py", "*.pyi", "*.proto") for file in (copy / room).rglob(suffix)]
    missing = [str(file.relative_to(copy)) for file in wanted if f"coatcheck/{file.relative_to(copy)}" not in held]
    assert missing == []
    assert "coatcheck/py.typed" in held
    assert {name for name in held if name.count("/") == 1 and name.endswith(".py")} == {"coatcheck/__init__.py"}
