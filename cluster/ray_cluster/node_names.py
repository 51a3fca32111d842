"""What nodes are called where people read of them. Pure; ids and names are Ray's."""

from collections.abc import Mapping
from typing import Final

_FEWEST_DIGITS: Final = 6


def node_names(names: Mapping[str, str]) -> dict[str, str]:
    """One for each node, by its id, and no two alike: its own, and where others have that too, with as much of the id
    as tells them apart. Ids are random as a rule, and begin alike where somebody has chosen them."""
    alike: dict[str, list[str]] = {}
    for id, name in names.items():
        alike.setdefault(name, []).append(id)
    told: dict[str, str] = {}
    for name, ids in alike.items():
        digits = _FEWEST_DIGITS
        while len({id[:digits] for id in ids}) < len(ids):
            digits += 1
        told |= {id: f"{name} ({id[:digits]})" if len(ids) > 1 else name for id in ids}
    return told
