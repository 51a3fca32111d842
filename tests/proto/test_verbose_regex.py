"""A pattern without its layout matches what the pattern with the flag x matches."""

import pytest

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.verbose_regex import remove_layout


@pytest.mark.parametrize(
    ("pattern", "without"),
    [
        ("a b # c", "a b # c"),
        ("(?i)a b", "(?i)a b"),
        ("(?x) a b # c", "ab"),
        ("(?x)\n a {2} # first (\n | \\ \\# [ a # b\n ]+\n", r"a{2}|\ \#[a]+"),
        ("(?xi) a b", "(?i)ab"),
        ("(?i-x)a b", "(?i-x)a b"),
        ("(?x: a b ) c", "(?:ab) c"),
        ("((?x) a b) c", "(ab) c"),
        ("(?x) a (?-x: b ) c", "a(?: b )c"),
        ("(?x) a (?-xi) b c", "a(?-i) b c"),
        ("(?x) []( ] (?P<n> b )", "[](](?P<n>b)"),
        ("(?x) [^] [] ( a", "[^][](a"),
        (r"\(\?x) a b", r"\(\?x) a b"),
        (r"[(?x)] a b", r"[(?x)] a b"),
    ],
)
def test_layout_is_removed_where_the_flag_holds(pattern: str, without: str) -> None:
    """The flag holds until the end of its group. Escaped white space stays. A pattern without the flag is unchanged."""
    assert remove_layout(pattern) == without
    assert remove_layout(without) == without


def test_a_line_break_in_a_verbose_pattern_is_not_matched() -> None:
    """llguidance writes a line break in a pattern as an escape, which would be a character to match."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, Grammar("regex", "(?x)\n a+  # several\n b\n").to_llguidance())
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str("aab")
    assert matcher.validate_tokens(tokens) == len(tokens)
    assert matcher.validate_tokens(tokenizer.tokenize_str("\n aab")) == 0
