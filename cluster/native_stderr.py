"""What Ray's and gRPC's C++ code writes to file descriptor 2, kept off the operator's terminal.

Such lines go to a file among Ray's logs; Python's `sys.stderr`, and with it all that the command says, stays where it
was.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..workers.safe_files import create_file


@contextmanager
def native_stderr_in(logs: Path) -> Iterator[None]:
    """Redirects descriptor 2 while inside. `logs`: a folder; if no file can be made there, the lines are dropped."""
    try:
        # Every user of the host may write to Ray's folders, so nobody must know the name beforehand.
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
