"""PrefixBook: what is known of every prefix block, held or not: where it hangs, whose it is, how it was wanted.

A block's record is one object for as long as any tier holds it, and stays for a bounded while after (a *ghost*), so
that a block that comes back is known again. Tiers keep the record beside the block and pass it on with it. It does not
know where a block lies, nor which goes next.
"""

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prefix:
    """One block and all before it; `depth` is how many those are, `tenant` the salt that its hash holds."""

    block_hash: bytes
    parent_hash: bytes
    depth: int = 0
    tenant: str = ""


class PrefixBook:
    """`max_ghosts` records are kept that no tier holds, the last to be named or wanted."""

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self._records: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, Prefix] = OrderedDict()  # what keeps a ghost alive

    def name(self, block_hash: bytes, parent_hash: bytes, depth: int = 0, tenant: str = "") -> Prefix:
        """The block's record, made when there is none."""
        record = self._records.get(block_hash)
        if record is None:
            record = self._records[block_hash] = Prefix(block_hash, parent_hash, depth, tenant)
        self._recent[block_hash] = record
        self._recent.move_to_end(block_hash)
        if len(self._recent) > self.max_ghosts:
            self._recent.popitem(last=False)
        return record
