"""Keeps what Ray's and gRPC's C++ code writes to file descriptor 2 off the operator's terminal.

Those lines go to a file among Ray's logs. Python's `sys.stderr`, and so every line of the command itself, still goes to
the terminal.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coatcheck.workers.host.safe_files import create_file


@contextmanager
def redirect_native_stderr(logs: Path) -> Iterator[None]:
    """Redirects file descriptor 2 to a new file in the folder `logs` while inside; to /dev/null if that fails."""
    try:
        # The name is random, because every user of the host may write to Ray's folders.
        file = create_file(logs / f"coatcheck-serve-{os.getpid()}-{secrets.token_hex(8)}.err")
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    sys.stderr.flush()
    before, terminal = sys.stderr, os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            sys.stderr.flush()
        os.dup2(terminal, 2)
        sys.stderr = before
        os.close(terminal)
