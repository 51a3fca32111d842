"""PromptLookup: drafts the next tokens of a sequence from its own text (prompt lookup decoding).

    text   ... [a b c] d e f ...... [a b c]        the last tokens, a b c, stand earlier in the text too,
    draft                                   d e f  so the draft is what followed them there

Answers that quote their prompt, edit a file or repeat themselves get good drafts, and no second model is needed
(Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; vLLM and SGLang call it ngram).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

SHORTEST_MATCH: Final = 2  # tokens; a single token matches by chance in every text
LONGEST_MATCH: Final = 8  # tokens; a longer match predicts no better
_MOST_PLACES: Final = 1024  # places with the same last two tokens that are compared further, the latest ones
FORCED: Final = LONGEST_MATCH + 1  # not a length: Draft.match of tokens that a grammar forces


class Draft(NamedTuple):
    """Guessed next tokens. `match`: how many of the text's last tokens also stand before the place that the draft was
    read from, SHORTEST_MATCH to LONGEST_MATCH; FORCED if a grammar forces the draft; 0 if there is no draft."""

    match: int
    token_ids: list[int]


NO_DRAFT: Final = Draft(0, [])


class PromptLookup:
    """The text of one sequence of at most `max_len` tokens. A search takes a few ns for each token of the text."""

    def __init__(self, max_len: int) -> None:
        self._text = np.empty(max_len, np.int32)
        self._length = 0

    def draft(self, token_ids: Sequence[int], count: int) -> Draft:
        """Up to `count` tokens that may follow `token_ids`. These begin with the `token_ids` of the call before."""
        length = len(token_ids)
        text = self._text
        text[self._length : length] = token_ids[self._length :]
        self._length = length
        if length <= SHORTEST_MATCH or count < 1:
            return NO_DRAFT
        # The ends of the earlier occurrences of the last `match` tokens.
        last = length - 1
        is_pair = (text[1:last] == text[last]) & (text[: last - 1] == text[last - 1])
        match, ends = SHORTEST_MATCH, np.flatnonzero(is_pair)[-_MOST_PLACES:] + 1
        if not len(ends):
            return NO_DRAFT
        while match < LONGEST_MATCH:
            longer = ends[ends >= match]
            longer = longer[text[longer - match] == text[last - match]]
            if not len(longer):
                break
            match, ends = match + 1, longer
        follows = int(ends[-1]) + 1  # the latest match is the likeliest
        draft: list[int] = []
        while len(draft) < count:
            at = follows + len(draft)  # a match that reaches the end goes on with the draft itself
            draft.append(int(text[at]) if at < length else draft[at - length])
        return Draft(match, draft)
