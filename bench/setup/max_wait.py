"""The time limits of single waits, and of programs, in tests and benchmarks."""

from typing import Final

# Importing torch, starting Ray or restarting a group takes seconds on an idle machine, and minutes if ten other
# processes share two cores. A wait ends with its event, so a long limit costs time only if the event never comes.
MAX_WAIT_SECONDS: Final = 300.0

# A program that computes for about a minute on an idle core, such as one that runs kernels in Triton's interpreter.
# pytest's limit for a test (pyproject.toml) is longer.
MAX_PROGRAM_SECONDS: Final = 1500.0
