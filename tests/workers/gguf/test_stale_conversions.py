"""Conversions of a file's former contents are deleted, except those that a process uses."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf import conversion_cache, stale_conversions
from coatcheck.workers.gguf.conversion_cache import cached_directory, convert, hold_directory
from coatcheck.workers.gguf.stale_conversions import Source, hold_for_process
from tests.workers.gguf.gguf_models import write_model

# Holds the conversion of argument 1 like a server, converts it if argument 2 says so and stops in the midst of that,
# and goes on when it is told so.
_SERVER = """
import sys
from pathlib import Path
from coatcheck.workers.gguf.conversion_cache import convert, hold_directory

def stop(done, total):
    if done < total and not told:
        print("in use", flush=True)
        told.append(sys.stdin.readline())

path, told = Path(sys.argv[1]), []
directory = hold_directory(path, "auto")
if sys.argv[2] == "converts":
    convert(path, directory, "auto", stop)
else:
    print("in use", flush=True)
    sys.stdin.readline()
print("done", (directory / "model.safetensors").is_file(), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("llama"), Type.Q8_0)[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "coatcheck" / "gguf"
    release_all()


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy2(model, tmp_path / "tiny.gguf"))


def release_all() -> None:
    """As if this process ended."""
    while stale_conversions._held:
        os.close(stale_conversions._held.popitem()[1])


def serve(path: Path, dtype: str = "auto", *, outlives: bool = False) -> tuple[Path, int]:
    """What `serve` does with the file: (directory, bytes that it freed)."""
    directory = hold_directory(path, dtype, outlives=outlives)
    return directory, convert(path, directory, dtype)


def replace_file(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


@contextmanager
def server(path: Path, does: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the conversion of the file. A line to its stdin lets it go on."""
    command = [sys.executable, "-c", _SERVER, str(path), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "in use\n"
            yield process
        finally:
            process.kill()


def test_a_replaced_file_leaves_no_conversion(file: Path, cache: Path) -> None:
    """Those of all dtypes are deleted, and the bytes are counted."""
    old = [serve(file, dtype)[0] for dtype in ("auto", "float32")]
    size = sum(entry.stat().st_size for one in old for entry in one.parent.rglob("*") if entry.is_file())
    release_all()
    replace_file(file)
    new, freed = serve(file)
    assert freed == size > 1 << 20
    assert [path.name for path in cache.iterdir()] == [new.parent.name]
    assert (new / "model.safetensors").is_file()


def test_conversions_that_are_not_stale_stay(file: Path, tmp_path: Path) -> None:
    """Of another file, of another dtype, and of a conversion without a record of its file."""
    other = Path(shutil.copy2(file, tmp_path / "other.gguf"))
    kept = [serve(other)[0], serve(file, "bfloat16")[0]]
    convert(file, cached_directory(file, "float16"), "float16")
    kept.append(cached_directory(file, "float16"))
    release_all()
    assert serve(file)[1] == 0
    assert all((one / "model.safetensors").is_file() for one in kept)


def test_nothing_is_deleted_for_a_folder_that_a_user_names(file: Path, tmp_path: Path) -> None:
    """`coatcheck convert` leaves the cache alone."""
    old, _ = serve(file)
    release_all()
    replace_file(file)
    assert convert(file, tmp_path / "out", "auto") == 0 and old.is_dir()


def test_a_broken_file_deletes_nothing(file: Path) -> None:
    """Its header is read first."""
    old, _ = serve(file)
    release_all()
    file.write_bytes(b"GGUF")
    with pytest.raises(Exception, match="is truncated"):
        serve(file)
    assert (old / "model.safetensors").is_file()


def test_a_conversion_in_use_stays_until_its_server_ends(file: Path) -> None:
    """Its ranks may not have opened the weights yet. The next conversion deletes it."""
    old, _ = serve(file)
    release_all()
    with server(file, "serves") as process:
        replace_file(file)
        assert serve(file)[1] == 0 and (old / "model.safetensors").is_file()
        print("go on", file=process.stdin, flush=True)
        assert process.stdout is not None and process.stdout.readline() == "done True\n"
        process.wait(MAX_WAIT_SECONDS)
    replace_file(file)
    release_all()
    assert serve(file)[1] > 0 and not old.exists()


def test_a_conversion_in_progress_stays(file: Path) -> None:
    """Another process converts the former contents of the file. Its conversion succeeds."""
    with server(file, "converts") as process:
        old = cached_directory(file, "auto")
        replace_file(file)
        assert serve(file)[1] == 0 and old.with_name(f".{old.name}.draft").is_dir()
        print("go on", file=process.stdin, flush=True)
        assert process.stdout is not None and process.stdout.readline() == "done True\n"


def test_a_conversion_that_cannot_be_locked_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that this user can only read, a finished conversion is served, and a new one is refused."""

    def refuse(folder: Path, source: Source, *, outlives: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(conversion_cache, "hold_for_process", refuse)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match="cannot be converted into .*: Permission denied; give another folder"):
        hold_directory(path, "auto")
    directory = cached_directory(path, "auto")
    directory.mkdir(parents=True)
    assert hold_directory(path, "auto") == directory


def test_a_conversion_for_a_cluster_that_outlives_its_command_stays(file: Path) -> None:
    """Ranks that Ray restarts later need it."""
    old, _ = serve(file, outlives=True)
    release_all()
    replace_file(file)
    assert serve(file)[1] == 0 and (old / "model.safetensors").is_file()


def test_a_process_that_waits_while_the_folder_is_deleted_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for the lock of a folder that another process has locked to delete it."""
    folder, source = tmp_path / "key", Source((("a.gguf", 1, 2),), 1)
    folder.mkdir()
    deleter = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT)
    fcntl.flock(deleter, fcntl.LOCK_EX)
    asks, flock = threading.Event(), fcntl.flock

    def tell(handle: int, operation: int) -> None:
        asks.set()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", tell)
    waits = threading.Thread(target=hold_for_process, args=(folder, source))
    waits.start()
    assert asks.wait(MAX_WAIT_SECONDS)
    shutil.rmtree(folder.rename(tmp_path / "removed"))
    os.close(deleter)
    waits.join(MAX_WAIT_SECONDS)
    assert {path.name for path in folder.iterdir()} == {"in-use", "source.json"}
    assert Source.read(folder / "source.json") == source
    other = os.open(folder / "in-use", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_deletion_that_was_killed_is_ended(file: Path, cache: Path) -> None:
    """The next conversion deletes the rest."""
    left = cache / ".key.removed" / "tiny"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))
    assert serve(file)[1] == 1000
    assert not left.parent.exists()
