"""CrashRecord: a file on a rank's host that says why the rank ended.

The file holds the error that the rank raised, or the signal that Python's fault handler caught (SIGSEGV, SIGBUS,
SIGFPE, SIGILL, SIGABRT). The file is empty if the rank was killed by SIGKILL, or ended because it lost another rank.
From these files the next incarnation of a group tells whether a request may have crashed the previous one.

All records are in a folder that only this user can enter. Its parent is Ray's folder, where every user may write.
"""

import faulthandler
import logging
import os
from contextlib import suppress

from coatcheck.workers.core.runner_protocol import PeerLost
from coatcheck.workers.host.safe_files import PrivateFolder

_FATAL = "Fatal Python error: "  # Python's fault handler writes this before the signal's name
_MAX_CHARACTERS = 300
_MAX_BYTES = 4096  # of a record; only its first line is used

_log = logging.getLogger(__name__)


class CrashRecord:
    """The record of one rank of one incarnation of a group.

    `base`: the common start of the paths of that incarnation's records; "" for no records. The folder of `base` is
    created if it is missing, and used only if it is private (see PrivateFolder).
    """

    def __init__(self, base: str, rank: int, tp: int) -> None:
        self._base = base
        self._rank = rank
        self._tp = tp
        self._file: int | None = None  # open for as long as the process lives

    def open_record(self) -> None:
        """Create the file, and let Python's fault handler write to it.

        If that fails, log a warning: the rank runs without a record.
        """
        if not self._base:
            return
        folder_path, name = _folder_and_name(self._base, self._rank)
        try:
            with PrivateFolder.make(folder_path) as folder:
                self._file = folder.create(name)
        except OSError as error:
            _log.warning("this rank has no crash record: %s", error)
            return
        faulthandler.enable(self._file, all_threads=False)
        _log.info("if this rank crashes, its stack is written to %s/%s", folder_path, name)

    def record_error(self, error: BaseException) -> None:
        """Write that this rank ends because of `error`."""
        if self._file is not None and (text := _describe(error)):
            with suppress(OSError):  # a full disk must not keep the rank alive
                os.write(self._file, text.encode())

    def describe_cause(self, error: BaseException) -> str:
        """Why the group ends, given that this rank ends because of `error`.

        "" if this rank only lost another, and no other rank of this host has a record.
        """
        if text := _describe(error):
            return f"rank {self._rank}: {text}"
        others = [rank for rank in range(self._tp) if rank != self._rank]
        return _find_crash(self._base, others, self._tp)[0] if self._base else ""


def read_crash(base: str, ranks: list[int], tp: int) -> str | None:
    """A description of the first crash among `ranks` of an incarnation, by their records on this host.

    "" if none of the ranks crashed. None if records are missing, so that it is unknown.
    """
    crash, is_complete = _find_crash(base, ranks, tp)
    return crash if crash or is_complete else None


def _folder_and_name(base: str, rank: int) -> tuple[str, str]:
    """(folder, file name) of a rank's record."""
    folder, name = os.path.split(base)
    return folder, f"{name}.rank-{rank}.crash"


def _describe(error: BaseException) -> str:
    """A one-line description of a crash; "" if the rank only lost another, or was told to end."""
    if isinstance(error, PeerLost) or not isinstance(error, Exception):
        return ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:_MAX_CHARACTERS]


def _find_crash(base: str, ranks: list[int], tp: int) -> tuple[str, bool]:
    """(the first crash among `ranks`, or ""; whether the records suffice to say so)."""
    is_complete = True
    for rank in ranks:
        folder_path, name = _folder_and_name(base, rank)
        try:
            with PrivateFolder.open(folder_path) as folder:
                line = folder.read(name, _MAX_BYTES).partition("\n")[0].strip()
        except OSError:
            is_complete = False
            continue
        line = line.removeprefix(_FATAL)
        if line == "Aborted" and tp > 1:
            is_complete = False  # torch also aborts a rank whose NCCL peer is gone
        elif line:
            return f"rank {rank}: {line}"[:_MAX_CHARACTERS], True
    return "", is_complete
