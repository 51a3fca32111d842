"""Files in folders where other users of the host may write, such as Ray's.

In such a folder another user can put a symbolic link, a FIFO or their own file at any name. So `create_file` fails if
the name exists. `read_file` fails for anything but a regular file, follows no link in the last part of the path, and
does not block on a FIFO. Only this user can enter a PrivateFolder, so other users cannot create, replace or remove its
files.
"""

import os
import stat
from contextlib import suppress
from typing import Final, Self

_PRIVATE_MODE: Final = 0o700


def create_file(path: str | os.PathLike[str], *, mode: int = 0o600, folder: int | None = None) -> int:
    """Create a file for writing and return its descriptor. Raises OSError if the name exists.

    `folder`: descriptor of the folder that `path` is relative to.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode, dir_fd=folder)


def read_file(path: str | os.PathLike[str], max_bytes: int, *, folder: int | None = None, private: bool = False) -> str:
    """Return the first `max_bytes` bytes of a regular file as text. Raises OSError for anything that is not one.

    `private`: also raise PermissionError unless this user owns the file and no other user may access it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise PermissionError(f"{os.fspath(path)} is not a regular file")
        if private:
            _require_private(about, os.fspath(path))
        return os.read(descriptor, max_bytes).decode(errors="replace")
    finally:
        os.close(descriptor)


class PrivateFolder:
    """A folder of this user with mode 0700. It is kept open, so renaming its path has no effect on later calls."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: str) -> Self:
        """Raise OSError if there is no such folder, PermissionError if other users may use it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _require_private(os.fstat(descriptor), path)
        except PermissionError:
            os.close(descriptor)
            raise
        return cls(descriptor, path)

    @classmethod
    def make(cls, path: str) -> Self:
        """As `open`, but create the folder if it does not exist."""
        with suppress(FileExistsError):
            os.mkdir(path, _PRIVATE_MODE)
        return cls.open(path)

    def create(self, name: str) -> int:
        """Create a file for writing, replacing any file of this name, and return its descriptor."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)
        return create_file(name, folder=self._descriptor)

    def read(self, name: str, max_bytes: int) -> str:
        """See `read_file`."""
        return read_file(name, max_bytes, folder=self._descriptor)

    def close(self) -> None:
        """Close the folder. Its open files stay open."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _require_private(about: os.stat_result, path: str) -> None:
    if about.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {about.st_uid}, not to user {os.geteuid()} who runs this process"
        )
    if about.st_mode & 0o077:
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):04o}: others may use it; remove it, or set it to 0700"
        )
