"""Which memory this process holds, for tests of memory that a thread allocates in the background."""

import mmap
import threading
from pathlib import Path


def wait_until_populated() -> None:
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
