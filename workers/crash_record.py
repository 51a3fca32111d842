"""CrashRecord: what a rank that ends by itself leaves behind, in a file on its host.

It says there which error it raised, or Python's fault handler says which signal has ended it (SIGSEGV, SIGBUS, SIGFPE,
SIGILL, SIGABRT). One that was killed, or has only lost another rank, leaves the file empty. So it is known whether what
ran there may have ended it, or whether somebody pulled the plug. It does not know who reads it.
"""

import faulthandler
import logging
import os
from contextlib import suppress
from pathlib import Path

from .peer_lost import PeerLost

_FATAL = "Fatal Python error: "
_MOST_LETTERS = 300

_log = logging.getLogger(__name__)


class CrashRecord:
    """One rank's, of one incarnation of a group; `base`: what the paths of that incarnation begin with, or "" to keep
    nothing on disk."""

    def __init__(self, base: str, rank: int, tp: int) -> None:
        self._base = base
        self._rank = rank
        self._tp = tp
        self._file: int | None = None  # open for as long as the process lives

    def keep(self) -> None:
        """From now on a fault leaves its traces, and the log says where: the handler writes to one file alone."""
        if not self._base:
            return
        path = _path(self._base, self._rank)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            _log.warning("no record is kept of how this rank ends: %s", error)
            return
        faulthandler.enable(self._file, all_threads=False)
        _log.info("should this rank end by a fault, its trace is in %s", path)

    def note(self, error: BaseException) -> None:
        """This rank ends for this error."""
        if self._file is not None and (words := _words(error)):
            with suppress(OSError):  # a full disk is no reason to live on
                os.write(self._file, words.encode())

    def cause(self, error: BaseException) -> str:
        """Why the group ends by itself, when this rank ends for this error; "" where that is not known: it has only
        lost another, which left no record on this host."""
        if words := _words(error):
            return f"rank {self._rank}: {words}"
        others = [rank for rank in range(self._tp) if rank != self._rank]
        return _first_crash(self._base, others, self._tp)[0] if self._base else ""


def crash_of(base: str, ranks: list[int], tp: int) -> str | None:
    """How an incarnation that is over has ended, by the records of these ranks on this host: in words where one of
    them ended by itself, "" where none did, None where that is not known."""
    words, known = _first_crash(base, ranks, tp)
    return words if words or known else None


def _path(base: str, rank: int) -> str:
    return f"{base}.rank-{rank}.crash"


def _words(error: BaseException) -> str:
    if isinstance(error, PeerLost) or not isinstance(error, Exception):
        return ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:_MOST_LETTERS]


def _first_crash(base: str, ranks: list[int], tp: int) -> tuple[str, bool]:
    """Which of them ended by itself, and whether the others are known not to have."""
    known = True
    for rank in ranks:
        try:
            line = Path(_path(base, rank)).read_text(errors="replace").partition("\n")[0].strip()
        except OSError:
            known = False
            continue
        line = line.removeprefix(_FATAL)
        if line == "Aborted" and tp > 1:
            known = False  # torch aborts a rank whose NCCL peer is gone, too
        elif line:
            return f"rank {rank}: {line}"[:_MOST_LETTERS], True
    return "", known
