"""The tokenizer of a converted GGUF file: the ids of the tokenizer that the file was made from, in transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.generation_config import end_token_ids, sampling_defaults
from coatcheck.router.text.tiktoken_ranks import _PATTERN
from coatcheck.router.text.tokenizer import TokenizerJson
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.pre_tokenizers import PRE_TOKENIZERS
from coatcheck.workers.gguf.tokenizer_files import write_tokenizer
from tests.workers.gguf.gguf_files import add_byte_level, byte_tokenizer, finish

TEXTS = (
    "Hello, world! It's 12345 o'clock; they'LL say WE'VE 3.14159 dogs.",
    "  two spaces,\ttabs\n\n\nand lines   \n end  ",
    "def f(x):\n    return x ** 2  # наука, 漢字かな 🙂👩‍👩‍👧 naïve café",
    "CamelCaseWords snake_case_words ALLCAPS /path/to/file\r\nCRLF",
    "",
    " ",
    "<|im_start|>user\nHi<|im_end|>\n",
)
_TRAINED_ON = [*TEXTS, "the quick brown fox jumps over the lazy dog 0123456789"] * 3
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
Write = Callable[[gguf.GGUFWriter], None]


def converted(folder: Path, write: Write, arch: str = "llama") -> Path:
    """A folder with the tokenizer of a GGUF file whose fields `write` adds."""
    path, out = folder / "model.gguf", folder / "out"
    writer = gguf.GGUFWriter(path, arch)
    write(writer)
    finish(writer)
    out.mkdir()
    write_tokenizer(GgufFile.open(path), out)
    return out


def trained(size: int = 700) -> Tokenizer:
    """A byte-level vocabulary whose merges cross GPT-2's words as far as the way to split lets them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINED_ON, trainer)
    return tokenizer


def ids_of(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.parametrize(
    ("pre", "original"),
    [
        ("gpt-2", "GPT2Tokenizer"),
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen35", "Qwen3_5Tokenizer"),
        ("command-r", "CohereTokenizer"),
    ],
)
def test_byte_level_ids_are_those_of_the_original(tmp_path: Path, pre: str, original: str) -> None:
    """Also for digits, contractions, runs of spaces and special tokens in the text. Decoding gives the text back."""
    state = json.loads(trained().to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    reference = getattr(transformers, original)(vocab=state["vocab"], merges=merges)
    reference.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    loaded = TokenizerJson.load(str(converted(tmp_path, lambda writer: add_byte_level(writer, trained(), pre))))
    assert ids_of(loaded) == ids_of(reference)
    assert [loaded.decode(ids, skip_special_tokens=False) for ids in ids_of(loaded)] == list(TEXTS)


def test_falcon_splits_as_the_original(tmp_path: Path) -> None:
    """By the steps of Falcon's tokenizer.json."""
    reference = trained()
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    loaded = TokenizerJson.load(str(converted(tmp_path, lambda writer: add_byte_level(writer, trained(), "falcon"))))
    assert ids_of(loaded) == [reference.encode(text, add_special_tokens=False).ids for text in TEXTS]


def test_llama3_splits_as_the_original(tmp_path: Path) -> None:
    """By the pattern of transformers' converter for Llama 3's vocabulary."""
    pattern = TikTokenConverter(vocab_file="none").pattern
    assert PRE_TOKENIZERS["llama-bpe"].patterns == (pattern,)
    assert PRE_TOKENIZERS["llama-bpe"].ignores_merges


def test_kimi_splits_as_the_original() -> None:
    """By the pattern with which routers read the file of the original tokenizer."""
    assert PRE_TOKENIZERS["kimi-k2"].patterns == (_PATTERN,)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_way_to_split_loses_no_text(tmp_path: Path, pre: str) -> None:
    """The patterns compile, and the decoded ids are the text."""
    loaded = TokenizerJson.load(str(converted(tmp_path, lambda writer: add_byte_level(writer, trained(), pre))))
    for text in TEXTS:
        assert loaded.decode(loaded.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


PIECES: dict[str, float] = {
    piece: -float(rank)
    for rank, piece in enumerate(
        ["▁t", "he", "▁the", "in", "▁a", "er", "▁d", "og", "▁dog", "ox", "▁f", "▁fox", "an", "▁an", "nd", "▁and", "▁▁",
         "▁▁▁▁", "qu", "ick", "ic", "▁qu", "▁quick", "é", "ll", "llo", "He", "Hello", "▁Hello", "or", "wor", "▁wor"]
    )
}  # fmt: skip
CHARACTERS = sorted(set("abcdefghijklmnopqrstuvwxyzHIW0123456789.,!';▁"))
SPM_TEXTS = ("the quick brown fox and the dog", "Hello, world!  1234", "a    b", "naïve 🙂", "")


def add_sentencepiece(writer: gguf.GGUFWriter, *, is_gemma: bool = False, model: str = "llama") -> list[str]:
    """A vocabulary with the layout of Llama 2's, or of Gemma's. Returns the pieces."""
    heads = ["<pad>", "<eos>", "<bos>", "<unk>"] if is_gemma else ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*heads, *fallback, *PIECES, *(one for one in CHARACTERS if one not in PIECES)]
    kinds = [gguf.TokenType.CONTROL if piece != "<unk>" else gguf.TokenType.UNKNOWN for piece in heads]
    kinds += [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (len(pieces) - len(kinds))
    scores = [PIECES.get(piece, -1000.0 - index) for index, piece in enumerate(pieces)]
    # llama.cpp's converter writes Gemma's runs of spaces as spaces.
    stored = [piece.replace("▁", " ") if is_gemma and not piece.strip("▁") else piece for piece in pieces]
    stored = ["▁" if piece == " " else piece for piece in stored]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(stored)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    for name in ("bos", "eos", "unk"):
        named = {"bos": heads[2 if is_gemma else 1], "eos": heads[1 if is_gemma else 2], "unk": "<unk>"}[name]
        getattr(writer, f"add_{name}_token_id")(pieces.index(named))
    if is_gemma:
        writer.add_add_space_prefix(False)
    return pieces


@pytest.mark.parametrize("is_gemma", [False, True], ids=["llama", "gemma"])
def test_sentencepiece_ids_are_those_of_the_original(tmp_path: Path, is_gemma: bool) -> None:
    """Bytes for unknown characters, a space before the text for Llama alone, and the BOS token."""
    pieces: list[str] = []
    folder = converted(tmp_path, lambda writer: pieces.extend(add_sentencepiece(writer, is_gemma=is_gemma)))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:end], piece[end:])
        for piece in PIECES
        for end in range(1, len(piece))
        if piece[:end] in vocabulary and piece[end:] in vocabulary
    ]
    original = getattr(transformers, "GemmaTokenizer" if is_gemma else "LlamaTokenizer")
    reference = original(vocab=vocabulary, merges=merges, **({} if is_gemma else {"legacy": True}))
    loaded = TokenizerJson.load(str(folder))
    for text in SPM_TEXTS:
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert loaded.encode(text) == [vocabulary["<bos>" if is_gemma else "<s>"], *ids]
        assert loaded.decode(ids) == text.replace("▁", " ")
    # sentencepiece and llama.cpp add a space even before a space; transformers 5 does not.
    spaces = loaded.encode(" the", add_special_tokens=False)
    assert spaces == [vocabulary[piece] for piece in (["▁the"] if is_gemma else ["▁", "▁the"])]
    assert loaded.decode(spaces) == " the"


def test_gemma4_has_the_merges_of_the_original(tmp_path: Path) -> None:
    """In the order of the file, which is not that of the scores here."""
    pieces: list[str] = []
    merges = [
        (piece[:end], piece[end:])
        for piece in reversed(PIECES)
        for end in range(1, len(piece))
        if {piece[:end], piece[end:]} <= {*PIECES, *CHARACTERS}
    ]

    def write(writer: gguf.GGUFWriter) -> None:
        pieces.extend(add_sentencepiece(writer, is_gemma=True, model="gemma4"))
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_add_bos_token(True)

    loaded = TokenizerJson.load(str(converted(tmp_path, write, "gemma4")))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    original: Any = transformers.GemmaTokenizer
    reference = original(vocab=vocabulary, merges=merges)
    for text in SPM_TEXTS:
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert loaded.encode(text) == [vocabulary["<bos>"], *ids]
        assert loaded.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(("arch", "write"), [
    ("llama", add_sentencepiece),
    ("qwen2", lambda writer: add_byte_level(writer, trained(), "qwen2")),
])  # fmt: skip
def test_ids_are_those_of_transformers_own_conversion(tmp_path: Path, arch: str, write: Any) -> None:
    """For the tokenizers that transformers reads from GGUF as their originals are."""
    loaded = TokenizerJson.load(str(converted(tmp_path, write, arch)))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    texts = SPM_TEXTS if arch == "llama" else TEXTS
    for text in texts:
        assert loaded.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


def test_special_tokens_template_and_sampling(tmp_path: Path) -> None:
    """The EOS token and those that llama.cpp knows to end an answer end answers here."""

    def write(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, byte_tokenizer())
        writer.add_eot_token_id(3)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    folder = converted(tmp_path, write)
    loaded = TokenizerJson.load(str(folder))
    assert end_token_ids(folder) == (2, 3)
    assert (sampling_defaults(folder).temperature, sampling_defaults(folder).top_k) == (0.5, 20)
    assert loaded.encode("hi")[0] == 1 and loaded.is_special(2)
    assert loaded.settings["bos_token"] == "<s>" and loaded.settings["eos_token"] == "<|end|>"
    assert loaded.template is not None


def test_tokens_of_gpt_oss_that_end_an_answer(tmp_path: Path) -> None:
    """<|end|> ends a message of gpt-oss, and not the answer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|return|>", "<|call|>"])

    def write(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, tokenizer)
        writer.add_eot_token_id(tokenizer.get_vocab()["<|return|>"])

    found = set(end_token_ids(converted(tmp_path, write)))
    assert {tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")} <= found
    assert tokenizer.token_to_id("<|end|>") in found  # it is this file's EOS token


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_tokenizer_model("t5"), "tokenizer of the kind 't5'"),
        (lambda writer: None, "has no vocabulary (tokenizer.ggml.tokens)"),
        (lambda writer: add_byte_level(writer, byte_tokenizer(), "no-such"), "the pre-tokenizer 'no-such'"),
        (lambda writer: add_byte_level(writer, byte_tokenizer(), "default"), "does not say how its tokenizer splits"),
    ],
)
def test_a_tokenizer_that_is_not_read(tmp_path: Path, change: Write, words: str) -> None:
    """The error names the file and the key."""

    def write(writer: gguf.GGUFWriter) -> None:
        change(writer)
        if "kind" in words:
            writer.add_token_list(["a", "b"])

    with pytest.raises(InvalidModel) as error:
        converted(tmp_path, write)
    assert words in str(error.value) and "model.gguf" in str(error.value)
