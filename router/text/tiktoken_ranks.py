"""read_tiktoken(): reads the tokenizer of a checkpoint whose byte pairs are in tiktoken's format, as of Kimi K2.

The file `tiktoken.model` has a line for each token: its bytes in base64, and its rank. tokenizer_config.json has the
names of the special tokens. The pattern that splits text before the pairs are merged is in the checkpoint's code. Code
of a checkpoint is never run, so _PATTERN has it.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from coatcheck.proto.errors import InvalidModel

FILE: Final = "tiktoken.model"
_CLASS: Final = "TikTokenTokenizer"
_SPECIAL: Final = 256  # number of special tokens; their ids follow those of the file
_CAPITALS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+{_ENDING}",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def is_tiktoken(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether read_tiktoken reads the tokenizer of this directory. `config`: of tokenizer_config.json."""
    return config.get("tokenizer_class") == _CLASS and (directory / FILE).is_file()


def read_tiktoken(directory: Path, config: Mapping[str, Any], alphabet: Mapping[int, str]) -> Tokenizer:
    """`alphabet`: the character that stands for each byte. Raises InvalidModel for a broken file."""
    try:
        lines = (directory / FILE).read_bytes().split(b"\n")
        ranks = {
            base64.b64decode(token, validate=True): int(rank)
            for token, rank in (line.split() for line in lines if line)
        }
        names = {
            int(place): str(token["content"]) for place, token in (config.get("added_tokens_decoder") or {}).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModel(
            f"{directory / FILE} or tokenizer_config.json is broken ({error}); fetch both again"
        ) from error
    text = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [
            (rank, ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks
        ]
    merges.sort(key=lambda merge: merge[:3])
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    pairs = [(text[left], text[right]) for *_, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    places = range(len(ranks), len(ranks) + _SPECIAL)
    tokenizer.add_special_tokens(
        [
            AddedToken(names.get(place, f"<|reserved_token_{place}|>"), normalized=False, special=True)
            for place in places
        ]
    )
    return tokenizer
