"""Detokenizers return whole characters only, and all pieces together are the decoded tokens."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coatcheck.router.text.detokenizer import WindowDetokenizer
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import VOCAB
from tests.router.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
TEXT = st.text(st.sampled_from("abc fox 漢字かな🙂👩‍🚀é½\n"), max_size=30)
BYTE_FALLBACK = byte_fallback_tokenizer()


@given(IDS, st.booleans())
def test_byte_level_text_is_the_library_decode(ids: list[int], skip: bool) -> None:
    """Whatever the tokens, even half characters, the pieces join to what the tokenizers package decodes."""
    tokenizer = TokenizerJson(BYTE_LEVEL, None)
    detokenizer = tokenizer.detokenizer(skip)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("package", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(text=TEXT)
def test_a_character_is_never_split(package: Tokenizer, text: str) -> None:
    """For the tokens of a text no piece holds a replacement character, and the pieces join to the text."""
    ids = package.encode(text, add_special_tokens=False).ids
    detokenizer = TokenizerJson(package, None).detokenizer(True)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == package.decode(ids)


@pytest.mark.parametrize("package", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(ids=st.lists(st.integers(0, 269), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_batches_make_no_difference(package: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """The text returned so far depends on the tokens and not on how they were batched, so a stream can be resumed."""
    ids = [token for token in ids if token < package.get_vocab_size()]
    one, other = (TokenizerJson(package, None).detokenizer(True) for _ in range(2))
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in pairwise(bounds):
        assert one.feed(ids[start:end]) == "".join(other.feed([token]) for token in ids[start:end])
    assert one.flush() == other.flush()


def test_the_window_stays_short() -> None:
    """Each token costs two short decodes, however long the text, also if no character ever becomes whole."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(BYTE_FALLBACK.decode(ids, skip_special_tokens=False))

    detokenizer = WindowDetokenizer(decode, frozenset())
    vocabulary = BYTE_FALLBACK.get_vocab()
    for token in [vocabulary["<0xE6>"]] * 200 + [vocabulary["▁fox"]] * 200:
        detokenizer.feed([token])
    assert longest <= 16


def test_a_skipped_token_does_not_swallow_a_space() -> None:
    """A word after a skipped special token keeps its leading space."""
    ids = [BYTE_FALLBACK.get_vocab()[piece] for piece in ("▁fox", "</s>", "▁fox")]
    detokenizer = TokenizerJson(BYTE_FALLBACK, None).detokenizer(True)
    assert "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush() == "fox fox"


def test_ids_without_a_token_have_no_text() -> None:
    """A model's vocabulary may be padded past its tokenizer's."""
    assert TokenizerJson(BYTE_LEVEL, None).decode([100_000]) == ""
    assert TokenizerJson(BYTE_FALLBACK, None).decode([100_000]) == ""
