"""Stop strings: nothing past one gets out, nothing that might begin one gets out too early, nothing is lost."""

from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.router.serving.choice import StopStrings

LETTERS = st.text("ab🙂", max_size=12)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, letter by letter."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=6), STOPS)
@example(["a", "aab"], ["aab"])
@example(["ab"], ["ab", "b"])
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """However the text is cut into pieces, what comes out is what lies before the first stop string."""
    filter = StopStrings(stops)
    out = "".join([filter.feed(piece) for piece in pieces]) + filter.flush()
    assert (out, filter.hit) == cut("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=6), STOPS)
def test_only_what_might_begin_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    """After each piece everything is out, except the longest tail that is the beginning of a stop string."""
    filter, text, out = StopStrings(stops), "", ""
    for piece in pieces:
        text, out = text + piece, out + filter.feed(piece)
        if filter.hit is not None:
            return
        held = text[len(out) :]
        tails = [text[start:] for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in stops)]
        assert text == out + held and held == max(tails, key=len, default="")


def test_after_a_hit_nothing_comes_out() -> None:
    """A text that has ended stays ended."""
    filter = StopStrings(["end"])
    assert filter.feed("the end of") == "the "
    assert (filter.feed(" it"), filter.flush(), filter.hit) == ("", "", "end")
