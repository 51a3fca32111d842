"""How byte-level vocabularies of GGUF split a text before merges apply, by the name in `tokenizer.ggml.pre`.

llama.cpp gives each known tokenizer a name. The patterns are those of the models' own tokenizer.json. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: each piece of text is split by one after the other; their matches become pieces. `splits_words`: the
    byte-level step splits as GPT-2 does. `groups_digits`: after that step each three digits of a run are a piece, where
    the letters that stand for some bytes count as digits, as in Falcon's tokenizer.
    `ignores_merges`: a piece that is a token becomes it without merges.
    `adds_bos`: prompts begin with the BOS token, unless the file says otherwise. `composes`: texts are normalised to
    NFC."""

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False
    splits_words: bool = False
    groups_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def build(self) -> Any:
        steps: list[Any] = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.splits_digits:
            steps.append(Digits(individual_digits=True))
        steps.append(ByteLevel(add_prefix_space=False, use_regex=self.splits_words))
        if self.groups_digits:
            steps += [Digits(individual_digits=False), Split(Regex("[0-9][0-9][0-9]"), "isolated")]
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str, suffix: str = f"{_SUFFIX}|") -> str:
    """The pattern of OpenAI's cl100k vocabulary, with other runs of digits."""
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_SYMBOLS}|{_SPACES}"


def _cased_words(digits: str, suffix: str = "", *, ends: str = "/", without: str = "") -> str:
    """The pattern of OpenAI's o200k vocabulary, with other runs of digits and endings of words. `ends`: what may follow
    symbols, besides line breaks. `without`: excludes letters from these words."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{ends}]*|{_SPACES}"
    )


_QWEN35: Final = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf""" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"""
)
_LLAMA3: Final = PreTokenizer((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_CL100K: Final = PreTokenizer((_words(r"\p{N}{1,3}"),))
_ONE_DIGIT: Final = PreTokenizer((_words(r"\p{N}"),))
_QWEN2: Final = PreTokenizer((_words(r"\p{N}"),), composes=True)
_GPT2: Final = PreTokenizer(splits_words=True)
_STARCODER: Final = PreTokenizer(splits_words=True, splits_digits=True)
_KIMI_WORDS: Final = _cased_words(r"\p{N}{1,3}", f"{_SUFFIX}?", ends="", without=r"&&[^\p{Han}]")
_KIMI: Final = PreTokenizer((rf"[\p{{Han}}]+|{_KIMI_WORDS}",), ignores_merges=True)
_SEED: Final = PreTokenizer(
    (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
)
_GPT4O: Final = PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_SUFFIX}?"),))

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "lfm2", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), _ONE_DIGIT),
    "qwen35": PreTokenizer((_QWEN35,), composes=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "exaone4", "mellum", "trillion"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_cased_words(r"\p{N}"),), ignores_merges=True, adds_bos=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+",), splits_words=True, groups_digits=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK))),
    "kimi-k2": _KIMI,
    "seed-coder": _SEED,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), splits_digits=True),
}

# Files that were written before llama.cpp stored the name: by general.architecture.
UNNAMED: Final = {"qwen2": "qwen2", "qwen2moe": "qwen2", "gpt2": "gpt-2", "starcoder2": "starcoder", "falcon": "falcon"}
