"""PromptLookup: guesses the next tokens of a sequence from its own text (prompt lookup decoding).

    text   ... [a b c] d e f ...... [a b c]        the longest suffix that stands earlier in the text is a b c,
    draft                                   d e f  so the draft is what followed it there

Answers that quote their prompt, edit a file or repeat themselves are guessed well, and no second model is needed
(Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; vLLM and SGLang call it ngram).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

SHORTEST_MATCH: Final = 2  # tokens; a single token matches by chance in every text
LONGEST_MATCH: Final = 8  # a longer match predicts no better
FORCED: Final = LONGEST_MATCH + 1  # Draft.match of tokens that a grammar forces


class Draft(NamedTuple):
    """Guessed next tokens. `match`: how many tokens before them were the same, SHORTEST_MATCH to LONGEST_MATCH, or
    FORCED; 0 if there is no draft."""

    match: int
    token_ids: list[int]


NO_DRAFT: Final = Draft(0, [])


class PromptLookup:
    """The text of one sequence of at most `max_len` tokens. A search takes a few ns for each token of the text."""

    def __init__(self, max_len: int) -> None:
        self._text = np.empty(max_len, np.int32)
        self._length = 0

    def draft(self, token_ids: Sequence[int], count: int) -> Draft:
        """Up to `count` tokens that may follow `token_ids`, which extend those of the call before."""
        length = len(token_ids)
        text = self._text
        text[self._length : length] = token_ids[self._length :]
        self._length = length
        if length <= SHORTEST_MATCH or count < 1:
            return NO_DRAFT
        # The ends of the earlier occurrences of the last `match` tokens.
        match, ends = 1, np.flatnonzero(text[: length - 1] == text[length - 1])
        while match < LONGEST_MATCH:
            longer = ends[ends >= match]
            longer = longer[text[longer - match] == text[length - 1 - match]]
            if not len(longer):
                break
            match, ends = match + 1, longer
        if match < SHORTEST_MATCH:
            return NO_DRAFT
        follows = int(ends[-1]) + 1  # the latest match is the likeliest
        draft: list[int] = []
        while len(draft) < count:
            at = follows + len(draft)  # a match that reaches the end goes on with the draft itself
            draft.append(int(text[at]) if at < length else draft[at - length])
        return Draft(match, draft)
