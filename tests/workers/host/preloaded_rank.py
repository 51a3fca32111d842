"""What the fork server of the tests' ranks has loaded: all that a rank imports, in the order of a rank's process."""

from coatcheck.workers.host.fast_imports import import_transformers

import_transformers()

import coatcheck.workers.rank  # noqa: E402, F401
