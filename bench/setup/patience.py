"""The time limit of a single wait in tests and benchmarks."""

from typing import Final

# A process that imports torch, a start of Ray, a group that comes back: seconds on an idle machine, minutes if ten
# others share two cores. A wait ends with its event, so a long limit costs time only if the event never comes.
PATIENCE_SECONDS: Final = 300.0
