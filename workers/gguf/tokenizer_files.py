"""write_tokenizer(): tokenizer.json, tokenizer_config.json, generation_config.json and chat template of a GGUF file.

GGUF has the tokens with their types, and either merges (byte-level vocabularies, `tokenizer.ggml.model` gpt2), scores
(sentencepiece, llama), or merges of sentencepiece's tokens (gemma4). Scores become merges, as in transformers' own
conversion of sentencepiece models. Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.pre_tokenizers import PRE_TOKENIZERS, UNNAMED, PreTokenizer

_SPACE: Final = "\u2581"  # how sentencepiece writes a space
_KEY: Final = "tokenizer.ggml."
# Tokens that end an answer, whatever the file's EOS token is. Those of llama.cpp, which knows them by their texts.
_ENDS: Final = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
        "<|tool_response>", "<eos>",
        "<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip
_SAMPLING: Final = {  # {metadata key: field of generation_config.json}
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class TokenKind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Raises InvalidModel for a tokenizer that is missing, malformed, or of a kind that is not read."""
    vocabulary = Vocabulary.of(file)
    _build_tokenizer(file, vocabulary).save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.special_id(key)) is not None:
            settings[f"{name}_token"] = vocabulary.tokens[token]
    _write_json(directory / "tokenizer_config.json", settings)
    generation = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    _write_json(directory / "generation_config.json", special_tokens(file) | generation)
    if (template := file.metadata.get("tokenizer.chat_template")) is not None:
        (directory / "chat_template.jinja").write_text(_text(file, "tokenizer.chat_template", template))
    if (template := file.metadata.get("tokenizer.chat_template.tool_use")) is not None:
        folder = directory / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(_text(file, "tokenizer.chat_template.tool_use", template))


def special_tokens(file: GgufFile) -> dict[str, Any]:
    """bos_token_id, eos_token_id (a list) and pad_token_id, as in config.json."""
    vocabulary = Vocabulary.of(file)
    return {
        "bos_token_id": vocabulary.special_id("bos"),
        "eos_token_id": vocabulary.end_ids() or None,
        "pad_token_id": vocabulary.special_id("padding"),
    }


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file and their kinds, by id. `scores`: of sentencepiece's; empty for byte-level ones."""

    file: GgufFile
    model: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    @classmethod
    def of(cls, file: GgufFile) -> "Vocabulary":
        metadata = file.metadata
        model, tokens = metadata.get(f"{_KEY}model"), metadata.get(f"{_KEY}tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise InvalidModel(f"{file.path} has no vocabulary ({_KEY}tokens); give a file with a tokenizer")
        if model not in ("gpt2", "llama", "gemma4"):
            raise InvalidModel(
                f"{file.path} has a tokenizer of the kind {model!r} ({_KEY}model), which is not read; served are gpt2, "
                "llama and gemma4"
            )
        if len(set(tokens)) != len(tokens):
            raise InvalidModel(f"{file.path} has a token twice in its vocabulary; fetch it again")
        kinds = metadata.get(f"{_KEY}token_type") or [TokenKind.NORMAL] * len(tokens)
        scores = metadata.get(f"{_KEY}scores", []) if model == "llama" else []
        if len(kinds) != len(tokens) or (model == "llama" and len(scores) != len(tokens)):
            raise InvalidModel(f"{file.path} has types or scores for other numbers of tokens; fetch it again")
        return cls(file, model, tokens, kinds, scores)

    def special_id(self, name: str) -> int | None:
        """The id of a special token: bos, eos, eot, eom, unknown or padding; None if the file has none."""
        token = self.file.metadata.get(f"{_KEY}{name}_token_id")
        if token is None and self.model == "llama":
            token = {"bos": 1, "eos": 2, "unknown": 0}.get(name)  # llama.cpp's defaults
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise InvalidModel(f"{self.file.path} has {_KEY}{name}_token_id {token}, which is no token; fetch it again")
        return token

    def end_ids(self) -> list[int]:
        """The tokens that end an answer, the EOS token first."""
        named = [self.special_id(name) for name in ("eos", "eot", "eom")]
        marked = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
        known = [index for index, token in enumerate(self.tokens) if token in _ENDS and self.kinds[index] in marked]
        texts = {self.tokens[index] for index in known}
        if {"<|return|>", "<|call|>"} <= texts:  # gpt-oss, where <|end|> ends a message, and not the answer
            known = [index for index in known if self.tokens[index] != "<|end|>"]
        return list(dict.fromkeys(token for token in (*named, *known) if token is not None))

    def is_special(self, index: int) -> bool:
        named = ("bos", "eos", "eot", "eom", "unknown", "padding")
        return self.kinds[index] in (TokenKind.CONTROL, TokenKind.UNKNOWN) or (
            f"{_KEY}token_type" not in self.file.metadata and index in [self.special_id(name) for name in named]
        )

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """Of a byte-level vocabulary."""
        name = self.file.metadata.get(f"{_KEY}pre")
        if name in (None, "default"):
            name = UNNAMED.get(self.file.architecture)
            if name is None:
                raise InvalidModel(
                    f"{self.file.path} does not say how its tokenizer splits texts ({_KEY}pre); use a file that was "
                    "written since May 2024"
                )
        if name not in PRE_TOKENIZERS:
            raise InvalidModel(
                f"{self.file.path} has the pre-tokenizer {name!r} ({_KEY}pre), which is not known; serve the model's "
                "safetensors checkpoint instead"
            )
        return PRE_TOKENIZERS[name]

    @property
    def adds_bos(self) -> bool:
        default = self.model != "gpt2" or self.pre_tokenizer.adds_bos
        return bool(self.file.metadata.get(f"{_KEY}add_bos_token", default)) and self.special_id("bos") is not None

    @property
    def adds_eos(self) -> bool:
        return bool(self.file.metadata.get(f"{_KEY}add_eos_token", False)) and self.special_id("eos") is not None


def _build_tokenizer(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _byte_level(file, vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
    strips = file.architecture == "phi3" and vocabulary.model == "llama"
    added = []
    for index, token in enumerate(vocabulary.tokens):
        is_special = vocabulary.is_special(index)
        if not is_special and (vocabulary.kinds[index] != TokenKind.USER_DEFINED or not token.strip(f" {_SPACE}")):
            continue  # runs of spaces, which sentencepiece's own merges make too
        # Phi 3's markers swallow the spaces and line breaks that follow them.
        is_stripped = strips and is_special and token not in ("<unk>", "<s>", "<|endoftext|>")
        added.append(AddedToken(token, rstrip=is_stripped, normalized=False, special=is_special))
    tokenizer.add_tokens(added)
    tokenizer.post_processor = _post_processor(vocabulary)
    return tokenizer


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    splitter = vocabulary.pre_tokenizer
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.kinds[index] != TokenKind.UNUSED}
    pairs = _stored_merges(file, ids)
    tokenizer = Tokenizer(BPE(ids, pairs, fuse_unk=False, ignore_merges=splitter.ignores_merges))
    if splitter.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(file: GgufFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = file.metadata.get(f"{_KEY}merges")
    if not isinstance(merges, list):
        raise InvalidModel(f"{file.path} has a vocabulary without merges ({_KEY}merges); fetch it again")
    # A token may begin with a space, but has none later.
    pairs = [(merge[:place], merge[place + 1 :]) for merge in merges if (place := merge.find(" ", 1)) > 0]
    if lost := next((pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()), None):
        raise InvalidModel(f"{file.path} merges {lost[0]!r} and {lost[1]!r}, which are no tokens; fetch it again")
    return pairs


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    # Gemma's runs of spaces are stored as spaces.
    pieces = [token.replace(" ", _SPACE) if not token.strip(" ") else token for token in vocabulary.tokens]
    unknown = vocabulary.special_id("unknown")
    ids = {piece: index for index, piece in enumerate(pieces)}
    model = BPE(
        ids,
        _merges(pieces, vocabulary) if vocabulary.model == "llama" else _stored_merges(vocabulary.file, ids),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    adds_space = bool(vocabulary.file.metadata.get(f"{_KEY}add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if adds_space else replace
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _merges(pieces: Sequence[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the one with the highest score first; of equal scores the longest left
    piece."""
    text_kinds = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    ids = {piece: index for index, piece in enumerate(pieces) if vocabulary.kinds[index] in text_kinds}
    found = []
    for piece, index in ids.items():
        cuts = [(piece[:end], piece[end:]) for end in range(1, len(piece))]
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(vocabulary.scores[index], *pair) for pair in pairs]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]


def _post_processor(vocabulary: Vocabulary) -> Any:
    """Adds the tokens around a prompt that the file asks for."""
    bos, eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
    added = []
    single: list[str] = ["$A"]
    if vocabulary.adds_bos and bos is not None:
        added.append((vocabulary.tokens[bos], bos))
        single.insert(0, vocabulary.tokens[bos])
    if vocabulary.adds_eos and eos is not None:
        added.append((vocabulary.tokens[eos], eos))
        single.append(vocabulary.tokens[eos])
    if not added:
        return processors.ByteLevel(trim_offsets=False) if vocabulary.model == "gpt2" else None
    pair = [*single, *(f"{piece}:1" if piece != "$A" else "$B:1" for piece in single)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(dict(added).items()))


def _text(file: GgufFile, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidModel(f"{file.path} has {key} {value!r}; it should be a text")
    return value


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False))
