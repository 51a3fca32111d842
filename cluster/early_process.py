"""The process of a rank, started before `coatcheck serve --no-ray` knows its settings.

    serve:    starts the process ─▶ imports its own modules ─▶ checks the settings ─▶ sends the RankStart
    process:  imports torch and transformers ───────────────────────────────────────▶ loads the model

serve needs 1 s until it can start ranks, and a rank then imports its libraries for 3 s. torch reads its number of
threads from the environment when it is imported. So the process assumes one rank on this host, which has all cores. If
the settings say otherwise, ChildRank ends the process and starts all ranks as usual.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

# The arguments of a rank's process before the number of its socket.
COMMAND: Final = (sys.executable, "-P", "-m", "coatcheck.workers.rank_process")
EARLY: Final = "early"


@dataclass(frozen=True)
class EarlyProcess:
    """`connection`: the socket to the process, which waits there for a RankStart."""

    process: "subprocess.Popen[bytes]"
    connection: Connection

    def kill(self) -> None:
        """End the process, which has no RankStart and thus nothing to lose."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


_processes: Final[list[EarlyProcess]] = []  # at most one, which nobody has taken


def start_early_process(arguments: Sequence[str]) -> None:
    """Start the process if the command line `arguments` begins a cluster without Ray."""
    if arguments[:1] != ["serve"] or "--no-ray" not in arguments or "--help" in arguments:
        return
    with suppress(OSError):  # without room for a process ranks are started as usual, with an error if they fail too
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), EARLY],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # until it has a RankStart
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _processes.append(EarlyProcess(process, ours))


def take_early_process() -> EarlyProcess | None:
    """The process, if one was started and still runs. The next call returns None."""
    if not _processes:
        return None
    early = _processes.pop()
    if early.process.poll() is None:
        return early
    early.kill()
    return None
