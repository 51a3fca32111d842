"""Says whether a grammar allows a text whose markers are special tokens."""

from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.grammar import Grammar
from tests.router.fake_group import EOS
from tests.router.tiny_tokenizer import byte_level_tokenizer


def allows(grammar: Grammar, special: tuple[str, ...], text: str) -> bool:
    """Whether the grammar allows an answer that begins with the text, whose markers are special tokens."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    grammar.check_compiles()
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=EOS), grammar.to_llguidance())
    ids = tokenizer.encode(text).ids
    return bool(matcher.validate_tokens(ids) == len(ids))
