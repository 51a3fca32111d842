"""The time limit of a single wait in tests and benchmarks."""

from typing import Final

# Importing torch, starting Ray or restarting a group takes seconds on an idle machine, and minutes if ten other
# processes share two cores. A wait ends with its event, so a long limit costs time only if the event never comes.
MAX_WAIT_SECONDS: Final = 300.0
