"""Echoed prompts: the text, tokens and text_offset of a completion agree for any tokens."""

import codecs
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.text.text_offsets import prompt_offsets
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import VOCAB, FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

BEGINNING = 1  # "<s>", the special token that does not end an answer
BYTE_LEVEL = TokenizerJson(byte_level_tokenizer(), None)
BYTE_FALLBACK = byte_fallback_tokenizer()
IDS = st.lists(st.sampled_from([0, BEGINNING]) | st.integers(0, VOCAB - 1), min_size=1, max_size=30)
TEXT = st.text(st.sampled_from("abc fox 漢字かな🙂👩‍🚀é½\n"), min_size=1, max_size=20)


def with_beginning(tokenizer: Tokenizer) -> TokenizerJson:
    """A tokenizer that puts "<s>" before and "</s>" after each text, as those of many models do."""
    marks = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=marks)
    return TokenizerJson(tokenizer, None)


MARKED = with_beginning(byte_level_tokenizer())


def bytes_of(token: str) -> bytes:
    """The bytes of an entry of `tokens`, which spells out bytes that are no characters."""
    named = re.fullmatch(r"bytes:((?:\\x[0-9a-f]{2})+)", token)
    return bytes.fromhex(named[1].replace("\\x", "")) if named else token.encode()


def check_agreement(text: str, tokens: list[str], offsets: list[int], left_out: frozenset[int] = frozenset()) -> None:
    """The bytes of the tokens are the text, and each offset is the number of whole characters before its token.
    `left_out`: indices of tokens that are not in the text."""
    assert len(tokens) == len(offsets)
    decoder, before = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for place, (token, (begin, end)) in enumerate(zip(tokens, pairwise([*offsets, len(text)]), strict=True)):
        assert (begin, text[:begin]) == (len(before), before)
        is_apart = not decoder.getstate()[0] and not token.startswith("bytes:")
        said = b"" if place in left_out else bytes_of(token)
        if is_apart:
            assert text[begin:end] == said.decode()
        before += decoder.decode(said)
    assert before + decoder.decode(b"", True) == text


@given(ids=IDS)
def test_offsets_of_token_ids_index_into_what_they_decode_to(ids: list[int]) -> None:
    """The echo of token ids has all of them, also special tokens and parts of characters, and offsets are positions in
    the echo."""
    text = BYTE_LEVEL.decode(ids, skip_special_tokens=False)
    tokens = [LogprobsFormatter(BYTE_LEVEL).token_text(token) for token in ids]
    check_agreement(text, tokens, prompt_offsets(BYTE_LEVEL, ids, None))


@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), min_size=1, max_size=30))
def test_offsets_stay_in_the_text_of_any_tokenizer(ids: list[int]) -> None:
    """If the text of a token depends on its neighbours, offsets still begin at 0, never decrease, and stay inside the
    text."""
    tokenizer = TokenizerJson(BYTE_FALLBACK, None)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    offsets = prompt_offsets(tokenizer, ids, None)
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    for place in range(len(ids)):
        assert offsets[place] == len(tokenizer_feed(tokenizer, ids[:place]))


def tokenizer_feed(tokenizer: TokenizerJson, ids: list[int]) -> str:
    """The text that a stream of these tokens has shown so far."""
    return tokenizer.detokenizer(False).feed(ids)


@given(text=TEXT, before=st.sampled_from(["", "<s>", "</s><s>"]), behind=st.sampled_from(["", "</s>", "<s>"]))
def test_a_text_s_own_special_tokens_count(text: str, before: str, behind: str) -> None:
    """Special tokens that the tokenizer adds to a text are not in its echo; special tokens written in the text are."""
    sent = before + text + behind
    ids = MARKED.encode(sent)
    assert ids[0] == BEGINNING and ids[-1] == 0
    tokens = [LogprobsFormatter(MARKED).token_text(token) for token in ids]
    check_agreement(sent, tokens, prompt_offsets(MARKED, ids, sent), frozenset({0, len(ids) - 1}))


async def ask(router: HttpRouter, stream: bool, **asked: Any) -> tuple[str, list[str], list[int]]:
    """(text, tokens, offsets) of a choice; the chunks of a stream are joined."""
    asked = dict(model="tiny", echo=True, logprobs=1, seed=1, stream=stream, **asked)
    answer = await router.openai.completions.create(**asked)
    parts = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    scores = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for score in scores for token in score.tokens or []]
    offsets = [offset for score in scores for offset in score.text_offset or []]
    return "".join(part.text for part in parts), tokens, offsets


@pytest.mark.parametrize("stream", [False, True])
async def test_text_tokens_and_offsets_of_an_echo_agree(start_http_router: StartHttpRouter, stream: bool) -> None:
    """Over random prompts and answers of any tokens; special tokens of the answer are left out unless asked for."""
    dice = random.Random(stream)
    answers: list[int] = []
    router = await start_http_router(FakeGroup(token=lambda submit, choice, position: answers[position]))
    for turn in range(40):
        ids = [dice.choice([0, BEGINNING, dice.randrange(VOCAB)]) for _ in range(dice.randint(1, 12))]
        # One whole character last, so that no half of one is left over between prompt and answer, or at the end.
        whole = BYTE_LEVEL.encode("x", add_special_tokens=False)
        answers[:] = [dice.choice([BEGINNING, dice.randrange(1, VOCAB)]) for _ in range(dice.randint(0, 8))] + whole
        skip = turn % 2 == 0
        text, tokens, offsets = await ask(
            router, stream, prompt=[*ids, *whole], max_tokens=len(answers), extra_body={"skip_special_tokens": skip}
        )
        left_out = {len(ids) + 1 + place for place, token in enumerate(answers) if skip and token == BEGINNING}
        check_agreement(text, tokens, offsets, frozenset(left_out))
        assert text.startswith(BYTE_LEVEL.decode([*ids, *whole], skip_special_tokens=False))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("scores_only", [False, True])
async def test_special_tokens_of_an_echo_are_in_its_text(
    start_http_router: StartHttpRouter, stream: bool, scores_only: bool
) -> None:
    """The echo of token ids is their decoded text, with or without logprobs."""
    router = await start_http_router(FakeGroup())
    ids = [BEGINNING, *BYTE_LEVEL.encode("the fox"), 0, *BYTE_LEVEL.encode("漢"), BEGINNING]
    text, tokens, offsets = await ask(router, stream, prompt=ids, max_tokens=0 if scores_only else 2)
    assert text.startswith("<s>the fox</s>漢<s>")
    assert tokens[0] == "<s>" and offsets[:2] == [0, 3] and tokens[len(ids) - 1] == "<s>"
    assert offsets[len(ids) - 1] == len("<s>the fox</s>漢")
    asked: dict[str, Any] = dict(model="tiny", prompt=ids, echo=True, max_tokens=1, seed=1)
    assert (await router.openai.completions.create(**asked)).choices[0].text.startswith("<s>the fox</s>漢<s>")


async def test_added_special_tokens_are_not_in_an_echo(start_http_router: StartHttpRouter) -> None:
    """If the tokenizer adds a special token before each text, the echo is the text that was sent."""
    router = await start_http_router(FakeGroup(), tokenizer=MARKED)
    text, tokens, offsets = await ask(router, False, prompt="the fox", max_tokens=1)
    assert text.startswith("the fox") and tokens[0] == "<s>" and offsets[:2] == [0, 0]


async def test_offsets_end_where_a_stop_string_cuts_the_text(start_http_router: StartHttpRouter) -> None:
    """If a stop string cuts the text, no token's offset is beyond its end."""
    ids = BYTE_LEVEL.encode("the quick brown fox")
    router = await start_http_router(FakeGroup(token=lambda submit, choice, position: ids[position % len(ids)]))
    text, tokens, offsets = await ask(router, False, prompt="x", stop=["ick brown"], max_tokens=30)
    assert text == "xthe qu" and offsets == sorted(offsets) and offsets[-1] <= len(text) < len("".join(tokens))
