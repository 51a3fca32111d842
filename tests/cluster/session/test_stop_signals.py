"""StopSignals: what a closed terminal does to `coatcheck serve`."""

import signal
import subprocess
import sys

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS

_PROGRAM = """
import os, signal, sys
from coatcheck.cluster.session.stop_signals import StopSignals
signals = StopSignals()
signals.ends_at_once = False
for _ in range(2):
    os.kill(os.getpid(), signal.SIGHUP)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the kernel does not keep the order of pending signals
    assert signals.drain_requested.wait(float(sys.argv[1]))
os.kill(os.getpid(), signal.SIGTERM)
assert signals.drain_requested.wait(float(sys.argv[1]))
print(signals.kill_requested.wait(float(sys.argv[2])))
"""


@pytest.mark.parametrize(("is_ignored", "is_killed"), [(False, True), (True, False)], ids=["terminal", "nohup"])
def test_a_closed_terminal_drains(is_ignored: bool, is_killed: bool) -> None:
    """Two SIGHUP ask to drain, and SIGTERM after them to stop. Under nohup SIGHUP does nothing."""
    most = str(MAX_WAIT_SECONDS)
    inherited = signal.SIG_IGN if is_ignored else signal.SIG_DFL  # these tests may run under nohup themselves
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, most, most if is_killed else "0.5"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, inherited),
    )
    assert (done.stdout, done.stderr) == (f"{is_killed}\n", "")
