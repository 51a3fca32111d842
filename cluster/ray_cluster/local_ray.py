"""Finds the Rays that `coatcheck serve` of this user has started on this host, and their tokens.

Such a Ray accepts only clients that send its token. The token is in a file in Ray's folder, named by the port of Ray's
head and readable by its owner alone. `coatcheck serve` deletes the file when it ends; after kill -9 the next `coatcheck
serve` deletes it.

Every user of the host may write to Ray's folder, and could rename the file to the port of a server of their own, which
would then receive the token. Therefore the file also contains the port. This module does not import Ray.
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
_CONNECT_SECONDS: Final = 1.0
_TMP: Final = "/tmp"
_SOCKET_BYTES: Final = 107  # of a socket's path in Linux
_LONGEST_SOCKET: Final = "/ray/session_2026-11-23_04-17-06_614012_4194304/sockets/plasma_store"
_MAX_BYTES: Final = 4096


def ray_folder() -> Path:
    """The folder where Ray keeps its sessions, and the address of the Ray that was started last. A TMPDIR that is too
    long for Ray's sockets is not used."""
    return temporary_folder() / "ray"


def temporary_folder() -> Path:
    """RAY_TMPDIR; without it TMPDIR, or /tmp if TMPDIR is not set or is too long for Ray's sockets."""
    folder = os.environ.get("TMPDIR") or _TMP
    return Path(os.environ.get("RAY_TMPDIR") or (_TMP if is_too_long(folder) else folder))


def is_too_long(folder: str) -> bool:
    """Whether the paths of Ray's sockets in `folder` are longer than the kernel allows."""
    return len(os.fsencode(folder)) > _SOCKET_BYTES - len(_LONGEST_SOCKET)


@contextmanager
def publish_token(folder: Path, address: str, token: str) -> Iterator[None]:
    """While inside, a file in Ray's `folder` holds the token of the Ray whose head listens at `address`."""
    port = address.rpartition(":")[2]
    file = _token_file(folder, port)
    # Create a new file and rename it, so that a file of another user at this name is replaced and never written to.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with os.fdopen(create_file(temporary), "w") as output:
        output.write(f"{port} {token}")
    temporary.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def read_token(folder: Path, address: str) -> str | None:
    """The token of the Ray at `address`; None unless this user has started that Ray on this host."""
    host, _, port = address.rpartition(":")
    return _read_token_file(_token_file(folder, port)) if host in _LOOPBACK else None


def find_local_rays(folder: Path) -> list[tuple[int, str]]:
    """(start time in nanoseconds, address) of each Ray that this user has started. Some may have ended: kill -9 leaves
    the token file behind."""
    found = []
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if _read_token_file(file) is not None:
                port = file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
                found.append((file.stat().st_mtime_ns, f"{_HOST}:{port}"))
    return found


def delete_stale_tokens(folder: Path) -> None:
    """Delete the token files of this user's Rays that refuse connections, because kill -9 has ended them."""
    for _, address in find_local_rays(folder):
        port = address.rpartition(":")[2]
        try:
            socket.create_connection((_HOST, int(port)), timeout=_CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            with suppress(OSError):
                _token_file(folder, port).unlink()
        except (OSError, ValueError, OverflowError):  # that Ray may still run, or the name contains no port
            continue


def _token_file(folder: Path, port: str) -> Path:
    return folder / f"{_PREFIX}{port}{_SUFFIX}"


def _read_token_file(file: Path) -> str | None:
    """The file's token; None unless the file is private to this user and contains the port in its name."""
    try:
        port, _, token = read_file(file, _MAX_BYTES, private=True).partition(" ")
    except OSError:
        return None
    return token if file.name == f"{_PREFIX}{port}{_SUFFIX}" else None
