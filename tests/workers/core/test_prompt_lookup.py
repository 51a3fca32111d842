"""A draft is what followed the latest of the longest earlier occurrences of the text's end."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.workers.core.prompt_lookup import LONGEST_MATCH, NO_DRAFT, SHORTEST_MATCH, PromptLookup


def search(text: list[int], count: int) -> tuple[int, list[int]]:
    """The same draft, by comparing the text's end with every place."""
    best, follows = 0, 0
    for end in range(1, len(text)):
        match = 0
        while match < min(LONGEST_MATCH, end) and text[end - 1 - match] == text[-1 - match]:
            match += 1
        if match >= max(best, 1):
            best, follows = match, end
    if best < SHORTEST_MATCH or not count:
        return 0, []
    draft: list[int] = []
    while len(draft) < count:
        draft.append([*text, *draft][follows + len(draft)])
    return best, draft


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8), st.integers(0, 10))
def test_drafts_are_those_of_an_exhaustive_search(parts: list[list[int]], count: int) -> None:
    """The text grows from call to call; each call finds what a search of the whole text finds."""
    text: list[int] = []
    lookup = PromptLookup(300)
    for part in parts:
        text += part
        assert lookup.draft(text, count) == search(text, count)


def test_a_repetition_at_the_end_goes_on() -> None:
    """A match that overlaps the end is continued with the draft itself."""
    assert PromptLookup(20).draft([9, 1, 2, 1, 2, 1, 2], 5) == (4, [1, 2, 1, 2, 1])


def test_new_text_has_no_draft() -> None:
    """One equal token is no match."""
    lookup = PromptLookup(20)
    assert lookup.draft([1], 4) == NO_DRAFT
    assert lookup.draft([1, 2, 3, 4], 4) == NO_DRAFT
    assert lookup.draft([1, 2, 3, 4, 2], 4) == NO_DRAFT
    assert lookup.draft([1, 2, 3, 4, 2, 3], 2) == (2, [4, 2])


def test_a_search_of_a_long_text_compares_few_places() -> None:
    """A text of one token has 100,000 equal places, of which only the latest are compared further."""
    text, lookup = [7] * 100_000, PromptLookup(100_000)
    assert lookup.draft(text, 3) == (LONGEST_MATCH, [7, 7, 7])
    compared = 0

    class Watched(np.ndarray):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            nonlocal compared
            compared += len(key) if isinstance(key, np.ndarray) else 0
            return super().__getitem__(key)

    lookup._text = lookup._text.view(Watched)
    assert lookup.draft(text, 3) == (LONGEST_MATCH, [7, 7, 7])
    assert 0 < compared < 10_000
