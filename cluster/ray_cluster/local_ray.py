"""OwnRay: a Ray that `coatcheck serve` has started, as commands of the same user on the same host find it again.

Such a Ray lets in whoever shows its token. The token lies in a file beside Ray's sessions that nobody else may read,
named by the port where the Ray's head listens; it ends with the command, and what kill -9 has left with the next one.
Every user of the host may write to that folder, and could rename our file to the name of a port where they listen.
Therefore the file also contains the port that its token is for. This module does not import Ray.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from coatcheck.workers.host.safe_files import create_file, read_file

_PREFIX: Final = "coatcheck-"
_SUFFIX: Final = ".token"
_HOST: Final = "127.0.0.1"
_LOOPBACK: Final = (_HOST, "localhost")
_ANSWER_SECONDS: Final = 1.0
_MOST_BYTES: Final = 4096


def ray_folder() -> Path:
    """Where Ray keeps its sessions, and notes which was started last."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


@contextmanager
def publish_token(folder: Path, address: str, token: str) -> Iterator[None]:
    """While inside, a file in Ray's `folder` holds the token of the Ray whose head listens at `address`."""
    port = address.rpartition(":")[2]
    file = _file_of(folder, port)
    # A new file, renamed: whatever another user has put at this name is replaced, never written to.
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with os.fdopen(create_file(made), "w") as output:
        output.write(f"{port} {token}")
    made.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def forget_ended(folder: Path) -> None:
    """Takes away what this user's commands have left that could not end by themselves: a Ray that is known listens."""
    for _, address in own_rays(folder):
        port = address.rpartition(":")[2]
        try:
            socket.create_connection((_HOST, int(port)), timeout=_ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            with suppress(OSError):
                _file_of(folder, port).unlink()
        except (OSError, ValueError, OverflowError):  # it may live, or is no port: not ours to judge
            continue


def token_of(folder: Path, address: str) -> str | None:
    """None where this user has started no such Ray on this host."""
    host, _, port = address.rpartition(":")
    return _read(_file_of(folder, port)) if host in _LOOPBACK else None


def own_rays(folder: Path) -> list[tuple[int, str]]:
    """(when, in nanoseconds; address) of those that this user has started; some may have ended by kill -9."""
    found = []
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if _read(file) is not None:
                port = file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
                found.append((file.stat().st_mtime_ns, f"{_HOST}:{port}"))
    return found


def _file_of(folder: Path, port: str) -> Path:
    return folder / f"{_PREFIX}{port}{_SUFFIX}"


def _read(file: Path) -> str | None:
    """The file's token; None unless the file is private to this user and contains the port in its name."""
    try:
        port, _, token = read_file(file, _MOST_BYTES, private=True).partition(" ")
    except OSError:
        return None
    return token if file.name == f"{_PREFIX}{port}{_SUFFIX}" else None
