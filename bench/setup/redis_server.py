"""A temporary Redis server that keeps the state of a Ray head."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import listens
from coatcheck.bench.setup.servers import free_port


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Yield host:port of a Redis without files. Raise RuntimeError if Redis is not installed or fails to start."""
    program = shutil.which("redis-server") or shutil.which("redis-server", path=Path(sys.executable).parent)
    if program is None:
        raise RuntimeError("there is no redis-server; install it, or run `make programs`")
    address = f"127.0.0.1:{free_port()}"
    flags = ["--port", address.rpartition(":")[2], "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + MAX_WAIT_SECONDS
            while not listens(address):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"redis-server does not listen at {address}")
                time.sleep(0.05)
            yield address
        finally:
            process.kill()
