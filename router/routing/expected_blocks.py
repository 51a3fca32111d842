"""ExpectedBlocks: blocks of prompts that this router has sent, and for which no output has come yet.

A group will have cached these blocks by the time it computes a prompt that is sent now, so requests of one session that
arrive together go to one group. Each group has one bit; a set of groups is an int bitmask. A bit is reused after its
group has left.

The prompts form a radix tree, whose nodes are runs of blocks that the same prompts contain. The hash of a block covers
all blocks before it, so two chains that are equal at one depth are equal up to there, and a binary search finds where
they part. To add, remove or match a prompt therefore takes a few steps for each node on its path, however long it is.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Self


class ExpectedBlocks:
    """A prompt is identified by `key`, which the caller never uses twice. So removing a prompt of a group that has left
    changes nothing, even if another group has the same bit now."""

    def __init__(self) -> None:
        self._root = _Run(None, (), 0, 0)
        self._prompts: dict[int, dict[Hashable, _Run]] = {}  # group -> key -> the run with the prompt's last block

    def __len__(self) -> int:
        """Number of (group, block) pairs."""
        return sum((run.end - run.start) * len(run.prompts) for run in self._runs())

    def add(self, bit: int, key: Hashable, chain: Sequence[bytes]) -> None:
        """Records that a prompt with the blocks `chain` was sent to the group. `chain` must not change later."""
        run = self._root
        while run.end < len(chain):
            following = run.children.get(chain[run.end])
            if following is None:
                following = run.children[chain[run.end]] = _Run(run, chain, run.end, len(chain))
            elif (end := following.shared_end(chain)) < following.end:
                following = following.split(end)
            run = following
            run.add_prompt(bit)
        self._prompts.setdefault(bit, {})[key] = run

    def remove(self, bit: int, key: Hashable) -> None:
        """Removes a prompt that is computed or never will be; changes nothing if the group has no such prompt."""
        if (last := self._prompts.get(bit, {}).pop(key, None)) is not None:
            last.remove_prompt(bit)

    def remove_group(self, bit: int) -> None:
        """Removes all prompts of a group."""
        for last in self._prompts.pop(bit, {}).values():
            last.remove_prompt(bit)

    def move_group(self, bit: int, new: int) -> None:
        """Gives a group another bit, which no group has."""
        if (prompts := self._prompts.pop(bit, None)) is None:
            return
        self._prompts[new] = prompts
        for run in prompts.values():
            while bit in run.prompts:
                run.prompts[new] = run.prompts.pop(bit)
                run.groups ^= bit | new
                assert run.parent is not None, "the root has no prompts"
                run = run.parent

    def match(self, chain: Sequence[bytes]) -> list[tuple[int, int]]:
        """Pairs (end, groups) with ascending `end`: `groups` expect the blocks of `chain` from the previous pair's end
        up to `end`. No group expects the blocks after the last pair."""
        matched = []
        run = self._root
        while run.end < len(chain) and (following := run.children.get(chain[run.end])) is not None:
            end = following.shared_end(chain)
            matched.append((end, following.groups))
            if end < following.end:
                break
            run = following
        return matched

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        lasts = Counter(id(last) for prompts in self._prompts.values() for last in prompts.values())
        assert lasts.keys() <= {id(run) for run in (self._root, *self._runs())}, "a prompt outside the tree"
        for run in self._runs():
            assert run.start < run.end <= len(run.chain), "a run without blocks"
            assert run.parent is not None and run.parent.end == run.start, "a gap between two runs"
            assert run.parent.children[run.chain[run.start]] is run, "a run that its parent does not know"
            assert run.total == sum(run.prompts.values()) and min(run.prompts.values()) > 0, "prompts miscounted"
            assert run.groups == sum(run.prompts), "the set of groups and their prompts disagree"
            following = [child.total for child in run.children.values()]
            assert run.total == sum(following) + lasts[id(run)], "prompts that neither end nor go on"
            assert following != [run.total], "two runs that could be one"

    def _runs(self) -> Iterator["_Run"]:
        """Every run but the root."""
        rest = [*self._root.children.values()]
        while rest:
            run = rest.pop()
            yield run
            rest += run.children.values()


class _Run:
    """The blocks `chain[start:end]`, which are in the same prompts. `prompts`: number of these by group; `groups`: the
    set of these groups. `children`: by their first block."""

    __slots__ = ("chain", "children", "end", "groups", "parent", "prompts", "start", "total")

    def __init__(self, parent: Self | None, chain: Sequence[bytes], start: int, end: int) -> None:
        self.parent = parent
        self.chain = chain
        self.start = start
        self.end = end
        self.children: dict[bytes, Self] = {}
        self.prompts: dict[int, int] = {}
        self.groups = 0
        self.total = 0  # prompts of all groups

    def shared_end(self, chain: Sequence[bytes]) -> int:
        """The depth where `chain` parts from this run, or ends; at most `end`. `chain` has the run's first block."""
        own, end = self.chain, min(self.end, len(chain))
        if own[end - 1] == chain[end - 1]:
            return end
        return bisect_left(range(end), True, lo=self.start + 1, key=lambda depth: own[depth] != chain[depth])

    def split(self, end: int) -> Self:
        """Makes the blocks before `end` a run of their own, the parent of this one, and returns it."""
        assert self.parent is not None, "the root has no blocks"
        first = type(self)(self.parent, self.chain, self.start, end)
        first.prompts, first.groups, first.total = self.prompts.copy(), self.groups, self.total
        first.children[self.chain[end]] = self
        self.parent.children[self.chain[self.start]] = first
        self.parent, self.start = first, end
        return first

    def add_prompt(self, bit: int) -> None:
        """Counts one more prompt of the group."""
        self.prompts[bit] = self.prompts.get(bit, 0) + 1
        self.groups |= bit
        self.total += 1

    def remove_prompt(self, bit: int) -> None:
        """Counts one prompt less, in this run and in all its ancestors. Drops runs without prompts, and joins a run
        with its only child if both are now in the same prompts."""
        run = self
        while (parent := run.parent) is not None:
            run.total -= 1
            run.prompts[bit] -= 1
            if not run.prompts[bit]:
                del run.prompts[bit]
                run.groups &= ~bit
            if not run.total:
                del parent.children[run.chain[run.start]]
            elif len(run.children) == 1:
                (following,) = run.children.values()
                if following.total == run.total:
                    following.parent, following.start = parent, run.start
                    parent.children[run.chain[run.start]] = following
            run = parent
