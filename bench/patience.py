"""How long tests and benchmarks wait for one event before they call it missing."""

from typing import Final

# A process that imports torch, a start of Ray, a group that comes back: seconds on an idle machine, and minutes where
# ten others share two cores. Who waits goes on with the event, so a long limit costs time only where it never comes.
PATIENCE_SECONDS: Final = 300.0
