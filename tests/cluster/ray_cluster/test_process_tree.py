"""The processes below a process are found, killed and reaped."""

import os
import subprocess
import sys
from pathlib import Path

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.ray_cluster.process_tree import descendants
from tests.cluster.running_server import until
from tests.cluster.serving import lives

_SLEEPER = "import time; time.sleep(300)"
# It starts a process, says which, and waits for the end of its input, then ends.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""
_FAMILY = """
import os, subprocess, sys
from coatcheck.cluster.ray_cluster.process_tree import adopt_orphans, descendants, kill_descendants
middle = subprocess.Popen([sys.executable, "-c", {middle!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
inner = int(middle.stdout.readline())
soon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
assert {{middle.pid, inner, soon.pid}} == set(descendants(os.getpid()))
adopt_orphans()
middle.stdin.close()
middle.wait()
assert middle.returncode == 0 and inner in descendants(os.getpid()), "an orphan is not in sight"
kill_descendants(1.0)
print(inner, soon.wait(), flush=True)
"""


def test_orphans_end_too_and_who_ends_in_time_is_not_killed() -> None:
    """A process whose parent has ended is killed with the others after the grace period. One that ends within that
    period keeps its own exit code."""
    family = _FAMILY.format(middle=_PARENT.format(child=_SLEEPER))
    done = subprocess.run([sys.executable, "-c", family], capture_output=True, text=True, timeout=MAX_WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    inner, soon = map(int, done.stdout.split())
    assert soon == 0
    until(lambda: not lives(inner), "the orphan is gone", 5)


def test_a_process_is_told_with_its_command(tmp_path: Path) -> None:
    """Children and grandchildren are found with their command lines. Processes that have ended are not, even if nobody
    has reaped them."""
    parent = _PARENT.format(child=_SLEEPER)
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as middle:
        assert middle.stdout is not None
        inner = int(middle.stdout.readline())
        # While a process starts its program, the kernel shows no command line for a moment.
        until(lambda: _SLEEPER in descendants(os.getpid()).get(inner, ""), "its command line is shown", 5)
        found = descendants(os.getpid())
        assert middle.pid in found and os.getpid() not in found
        os.kill(inner, 9)
        os.kill(middle.pid, 9)
        until(lambda: not {inner, middle.pid} & descendants(os.getpid()).keys(), "they are gone", 5)


def test_a_process_may_be_called_anything(tmp_path: Path) -> None:
    """A process whose name and arguments are not UTF-8 is found like others."""
    named = "from pathlib import Path; Path('/proc/self/comm').write_bytes(b'\\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", named, b"\xff"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert named in descendants(os.getpid())[process.pid]
        process.kill()


def test_orphans_that_have_ended_are_reaped() -> None:
    """A process that adopts orphans leaves no zombies, and can still wait for its own children."""
    family = """
import os, subprocess, sys, time
from coatcheck.cluster.ray_cluster.process_tree import adopt_orphans, children, reap_children
adopt_orphans()
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
ours = children()
middle = subprocess.Popen(["sh", "-c", "sleep 0.2 & echo $!"], stdout=subprocess.PIPE, text=True)
orphan = int(middle.stdout.readline())
middle.wait()
while os.path.exists(f"/proc/{orphan}"):
    reap_children(children() - ours)
    time.sleep(0.01)
assert own.wait() == 7
"""
    subprocess.run([sys.executable, "-c", family], timeout=60, check=True)
