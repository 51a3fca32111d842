"""OwnNetwork: a network namespace with its own loopback, where the usual ports are free whatever else runs here."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Self

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_HOLD = "from tests.docs.own_network import hold; hold()"


class OwnNetwork:
    """A context manager. `reason` says why there is none; then `inside` leaves a command as it is."""

    def __init__(self) -> None:
        self.reason = ""
        self._holder: subprocess.Popen[str] | None = None
        self._enter: list[str] = []

    def __enter__(self) -> Self:
        if not (shutil.which("unshare") and shutil.which("nsenter")):
            self.reason = "unshare and nsenter are not installed"
            return self
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", "--net", *user, sys.executable, "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() == "up\n":
            user = ["--user", "--preserve-credentials"] if user else []
            self._enter = ["nsenter", "--target", str(self._holder.pid), "--net", *user, "--"]
        else:
            self.reason = f"no network namespace can be made: {self._holder.stderr.read().strip()}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` there."""
        return [*self._enter, *command]


def hold() -> None:
    """Brings the loopback interface up, says so, and keeps the namespace until stdin is closed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    print("up", flush=True)
    sys.stdin.read()
