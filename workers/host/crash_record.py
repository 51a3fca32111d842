"""CrashRecord: a file on a rank's host that says how the rank ended.

The file holds the error that the rank raised, or the signal that Python's fault handler saw (SIGSEGV, SIGBUS, SIGFPE,
SIGILL, SIGABRT). A rank that was killed, or that only lost another rank, leaves an empty file. So the next incarnation
of the group can tell whether a request may have ended the last one. All records lie in a folder that only this user can
enter: the folder above is Ray's, where every user of the host may write.
"""

import faulthandler
import logging
import os
from contextlib import suppress

from coatcheck.workers.core.errors import PeerLost
from coatcheck.workers.host.safe_files import PrivateFolder

_FATAL = "Fatal Python error: "
_MOST_LETTERS = 300
_MOST_BYTES = 4096  # of a record; only its first line is used

_log = logging.getLogger(__name__)


class CrashRecord:
    """The record of one rank of one incarnation of a group.

    `base`: the common beginning of the paths of that incarnation's records, or "" to write none. Its folder is created
    if it is missing, and used only if it is private (see PrivateFolder).
    """

    def __init__(self, base: str, rank: int, tp: int) -> None:
        self._base = base
        self._rank = rank
        self._tp = tp
        self._file: int | None = None  # open for as long as the process lives

    def keep(self) -> None:
        """Create the file and have Python's fault handler write there. If that fails, log a warning: the rank runs
        without a record, and why it ends is then not known."""
        if not self._base:
            return
        folder_path, name = _folder_and_name(self._base, self._rank)
        try:
            with PrivateFolder.make(folder_path) as folder:
                self._file = folder.create(name)
        except OSError as error:
            _log.warning("no record is kept of how this rank ends: %s", error)
            return
        faulthandler.enable(self._file, all_threads=False)
        _log.info("should this rank end by a fault, its trace is in %s/%s", folder_path, name)

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


def read_crash(base: str, ranks: list[int], tp: int) -> str | None:
    """How an incarnation that is over has ended, by the records of these ranks on this host: in words where one of
    them ended by itself, "" where none did, None where that is not known."""
    words, known = _first_crash(base, ranks, tp)
    return words if words or known else None


def _folder_and_name(base: str, rank: int) -> tuple[str, str]:
    """(folder, file name) of a rank's record."""
    folder, name = os.path.split(base)
    return folder, f"{name}.rank-{rank}.crash"


def _words(error: BaseException) -> str:
    if isinstance(error, PeerLost) or not isinstance(error, Exception):
        return ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:_MOST_LETTERS]


def _first_crash(base: str, ranks: list[int], tp: int) -> tuple[str, bool]:
    """(the first of `ranks` that ended by itself and how, or ""; whether every other rank's record could be read)."""
    known = True
    for rank in ranks:
        folder_path, name = _folder_and_name(base, rank)
        try:
            with PrivateFolder.open(folder_path) as folder:
                line = folder.read(name, _MOST_BYTES).partition("\n")[0].strip()
        except OSError:
            known = False
            continue
        line = line.removeprefix(_FATAL)
        if line == "Aborted" and tp > 1:
            known = False  # torch aborts a rank whose NCCL peer is gone, too
        elif line:
            return f"rank {rank}: {line}"[:_MOST_LETTERS], True
    return "", known
