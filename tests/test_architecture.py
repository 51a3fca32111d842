"""The rules of the source tree, checked by reading the sources: imports, names, lengths, packages."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import source_files

ROOT = Path(__file__).parents[1]
PACKAGES = ("proto", "kernels", "workers", "router", "cluster")
MAY_IMPORT = {
    "proto": set(),
    "kernels": set(),
    "workers": {"kernels", "proto"},
    "router": {"proto"},
    "cluster": {"kernels", "proto", "router", "workers"},
}
# Libraries that no file of a package may import, not even inside a function, and the files that may.
FORBIDDEN = [
    ("proto", {"torch", "ray", "transformers"}, set()),
    ("kernels", {"ray", "grpc", "transformers"}, set()),
    ("workers", {"ray"}, {"workers/actor.py"}),
    ("router", {"torch"}, set()),
    ("router", {"ray"}, {"router/actor.py"}),
]

# Files that any folder of their package may import, and that have a row of their own in the table of folders.
FILES_WITH_A_ROW = {"router/config.py"}
TORCH_FREE = ("workers/core", "workers/kv", "workers/structured", "workers/engine", "workers/service", "workers/gguf")
# What protoc generates. A file that imports a stub imports the folder `proto`.
STUBS = "proto/stubs"
# No folder may have more files than a reader can take in at once.
MAX_FILES = 16


def sources(*packages: str) -> list[Path]:
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    return [file for file in files if str(file.relative_to(ROOT).parent) != STUBS]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import in a file, those inside functions too."""
    package = ("coatcheck", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from .. import workers` names a package after the import.
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "coatcheck" and len(parts) > 1 and parts[1] in PACKAGES else None


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_those_below(package: str) -> None:
    """A package imports itself and the packages below it, never one beside or above it."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources(package)
        for line, module in imports(file)
        if (target := package_of(module)) and target != package and target not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize(("package", "libraries", "allowed"), FORBIDDEN)
def test_no_package_imports_a_forbidden_library(package: str, libraries: set[str], allowed: set[str]) -> None:
    """No file of a package imports a library that is forbidden there, not even lazily."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources(package)
        if str(file.relative_to(ROOT)) not in allowed
        for line, module in imports(file)
        if module.split(".")[0] in libraries
    ]
    assert wrong == []


def loaded_by(files: Sequence[Path], libraries: set[str]) -> list[str]:
    """Which of these libraries a new process has loaded after it has imported these files."""
    paths = [file.relative_to(ROOT).with_suffix("") for file in files]
    modules = [".".join(("coatcheck", *path.parts)) for path in paths]
    program = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; "
        f"print(*sorted({libraries!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def folder_of(module: str) -> str | None:
    """The folder of a module or of a name in a module, or the file where a row of the table names a file."""
    parts = module.split(".")[1:] if module.startswith("coatcheck.") else []
    for end in (len(parts), len(parts) - 1):
        file = ROOT.joinpath(*parts[:end]).with_suffix(".py") if end > 0 else None
        if file is not None and file.exists():
            return row_of(file)
    return None


def row_of(file: Path) -> str:
    """The row of the table that a file belongs to."""
    path = file.relative_to(ROOT)
    if str(path) in FILES_WITH_A_ROW:
        return str(path)
    return "proto" if str(path.parent) == STUBS else str(path.parent)


def table_of_folders() -> dict[str, set[str]]:
    """The table of docs/architecture.md: what each folder imports."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return {folder: set(re.findall(r"`([^`]+)`", targets)) for folder, targets in rows}


def test_folders_import_what_the_table_says() -> None:
    """The table in docs/architecture.md has every folder, and names exactly the folders that each one imports."""
    found: dict[str, set[str]] = {}
    for file in sources(*PACKAGES):
        folder = row_of(file)
        targets = {target for _, module in imports(file) if (target := folder_of(module))}
        found.setdefault(folder, set()).update(targets - {folder})
    assert table_of_folders() == found


def test_the_files_to_read_have_what_the_page_names() -> None:
    """docs/architecture.md walks through eight files, and every function that it names is in its file."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Eight files", 1)[1].split("\n## ", 1)[0]
    steps = re.findall(r"^\d\. `([^`]+\.py)`: (.*?)(?=^\d\. |^$)", section, re.MULTILINE | re.DOTALL)
    assert len(steps) == 8
    for path, text in steps:
        names = set(re.findall(r"`([a-z_]+)`", text))
        defined = {getattr(node, "name", None) for node in ast.walk(parsed(ROOT / path))}
        assert names and names <= defined, path


def test_what_the_page_names_exists() -> None:
    """Every file, `Class` and `Class.name` in the prose of docs/architecture.md is in the sources."""
    prose = (ROOT / "docs/architecture.md").read_text().split("## Folders")[0]
    assert [path for path in re.findall(r"`(\w+/[\w/]+\.py)`", prose) if not (ROOT / path).exists()] == []
    members: dict[str, set[str]] = {}
    for file in sources(*PACKAGES):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                functions = {
                    part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                fields = {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
                members.setdefault(node.name, set()).update(functions, fields)
    named = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", prose)
    assert named and [(a, b) for a, b in named if a not in members or (b and b not in members[a])] == []


def test_folders_form_no_circle() -> None:
    """No folder imports itself by way of others."""
    table = table_of_folders()
    TopologicalSorter(table).prepare()


def test_folders_that_decide_load_without_torch() -> None:
    """Importing every file of the folders that only decide loads no torch."""
    assert loaded_by([file for folder in TORCH_FREE for file in sorted((ROOT / folder).glob("*.py"))], {"torch"}) == []


def test_router_loads_without_torch() -> None:
    """Importing every file of the router loads neither torch nor transformers. Only its actor loads Ray."""
    files = [file for file in sources("router") if file.name != "actor.py"]
    assert loaded_by(files, {"torch", "transformers", "ray"}) == []


def test_no_file_is_named_utils() -> None:
    """A file is named after its concept, so none is called utils, common, helpers or types."""
    names = {"utils.py", "common.py", "helpers.py", "types.py"}
    files = sources(*PACKAGES, "tests", "bench", "demo")
    assert [str(file.relative_to(ROOT)) for file in files if file.name in names] == []


def test_packages_are_namespace_packages() -> None:
    """No package has an __init__.py, which could re-export names."""
    assert [package for package in PACKAGES if (ROOT / package / "__init__.py").exists()] == []


def test_files_stay_readable() -> None:
    """No file is longer than 400 lines."""
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources(*PACKAGES, "bench")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_folders_stay_readable() -> None:
    """No folder of sources, benchmarks or tests holds more than 16 modules."""
    folders = Counter(str(file.relative_to(ROOT).parent) for file in sources(*PACKAGES, "bench", "tests", "demo"))
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES} == {}


def test_modules_say_what_they_do() -> None:
    """Every module of the packages opens with a docstring."""
    files = sources(*PACKAGES, "bench", "demo")
    assert [str(file.relative_to(ROOT)) for file in files if not ast.get_docstring(parsed(file))] == []


def test_tests_open_with_a_sentence() -> None:
    """Every test function begins with a docstring that is a sentence of behaviour."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sources("tests")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if not (ast.get_docstring(node) or "").rstrip().endswith(".")
    ]
    assert wrong == []


def test_no_test_file_imports_another() -> None:
    """Shared test code is in helper modules: no test file imports a module named test_*."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources("tests")
        for line, module in imports(file)
        if re.fullmatch(r"(coatcheck\.)?tests\.(\w+\.)*test_\w+", module)
    ]
    assert wrong == []


def test_editable_install_sees_every_package() -> None:
    """In the editable install each package's files import under the package's name."""
    import coatcheck

    assert Path(coatcheck.__file__).parent == ROOT
    program = "import importlib.util as u; print([r for r in {!r} if u.find_spec('coatcheck.' + r) is None])"
    done = subprocess.run([sys.executable, "-c", program.format(PACKAGES)], capture_output=True, text=True, cwd="/")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_wheel_holds_every_package(tmp_path: Path) -> None:
    """A wheel of the repository's own files, built without a C compiler, has the sources, the .proto files, the type
    marker, and no other module."""
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
    wanted = [
        file
        for package in PACKAGES
        for suffix in ("*.py", "*.pyi", "*.proto")
        for file in (copy / package).rglob(suffix)
    ]
    missing = [str(file.relative_to(copy)) for file in wanted if f"coatcheck/{file.relative_to(copy)}" not in held]
    assert missing == []
    assert "coatcheck/py.typed" in held
    assert {name for name in held if name.count("/") == 1 and name.endswith(".py")} == {"coatcheck/__init__.py"}
