"""The contract number, and the message with which processes of different contracts refuse each other.

Releases with the same number work together, so groups, routers and the supervisor can be upgraded one at a time. A
release raises the number when the other side must not ignore its change:

- worker.proto: a new field that the receiver has to obey, or a new meaning of a field. A field that an older receiver
  may ignore keeps the number.
- Values that Ray pickles: a field that is removed, renamed or added without a default. These values are frozen
  dataclasses without slots. Their pickles name every field, and a field that a pickle lacks has its class's default.
- The supervisor: a new method.
"""

from typing import Final

from coatcheck import __version__

CONTRACT: Final = 0  # no release has been made yet
VERSION: Final = __version__


def contract_mismatch(other: str, contract: int, version: str) -> str:
    """The message that refuses process `other` with its `contract` and `version`; "" if the contracts are equal."""
    if contract == CONTRACT:
        return ""
    return (
        f"{other} runs coatcheck {version or '(unknown)'} with contract {contract}, this side {VERSION} with contract "
        f"{CONTRACT}. They would misunderstand each other: install one version on every node. To upgrade across this "
        "change, stop `coatcheck serve` and start it again"
    )
