"""The contract of worker.proto as a number, and what is said when a router and a group have different ones.

Releases with the same number work together whatever their versions, so that groups can be upgraded while others serve.
It grows with a change that the other side must not ignore: a field that has to be honoured, a meaning that is another.
A field that whoever does not know it may pass over leaves it as it is.
"""

from typing import Final

from coatcheck import __version__

CONTRACT: Final = 0
VERSION: Final = __version__


def disagreement(other: str, contract: int, version: str) -> str:
    """Why not to work with `other`, who speaks that contract; empty when it is ours."""
    if contract == CONTRACT:
        return ""
    return (
        f"{other} runs coatcheck {version or '(unknown)'} with contract {contract}, this side {VERSION} with contract "
        f"{CONTRACT}, and they would misunderstand each other; install one version on every node, or, to upgrade over "
        "this change, end `coatcheck serve` and start it again"
    )
