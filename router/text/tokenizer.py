"""TokenizerJson: text to token ids and back, from the files of a model.

Reads tokenizer.json with the tokenizers package, or Kimi K2's tiktoken.model. Another checkpoint is read by
transformers' AutoTokenizer, which is imported only then because it imports torch. Callers must keep long texts off the
event loop.
"""

import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders

from coatcheck.proto.errors import InvalidModel, NeverFits
from coatcheck.proto.json_file import read_json_object
from coatcheck.router.text.chat_template import TOOL_TEMPLATE, ChatTemplate
from coatcheck.router.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from coatcheck.router.text.tiktoken_ranks import FILE as TIKTOKEN_FILE
from coatcheck.router.text.tiktoken_ranks import is_tiktoken, read_tiktoken

_TEMPLATES = ("chat_template.jinja", "chat_template.json", TOOL_TEMPLATE)
_FILES = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *_TEMPLATES,
    "generation_config.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    *("config.json", "*.model", "vocab.*", "merges.txt"),  # for AutoTokenizer
]
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

# `encode` encodes a text of at most this many characters per allowed token as a whole.
_CHARACTERS_PER_TOKEN: Final = 8


def find_files(model: str) -> Path:
    """The folder of a model's tokenizer, chat template and generation_config.json: `model` itself, or the local copy of
    a Hugging Face model id. Raises InvalidModel if it is neither."""
    return Path(model) if Path(model).is_dir() else _download(model)


class TokenizerJson:
    """The tokenizer of one model. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.settings: dict[str, Any] = {}  # of tokenizer_config.json and special_tokens_map.json; set by `load`
        self.directory: str | None = None  # from which side processes load the same tokenizer; set by `load`
        # Computed here and not at the first request, because a large vocabulary would block the event loop.
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # the largest id that has a token, plus 1
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        # The ids of special tokens by their text.
        self.special_ids: dict[str, int] = {added[token].content: token for token in self._special}
        self._pieces: list[bytes] | None = None
        self._text_pieces: list[bytes] | None = None
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._pieces = _pieces(vocabulary, self.vocab_size)
            self._text_pieces = [b"" if index in self._special else piece for index, piece in enumerate(self._pieces)]

    @classmethod
    def load(cls, model: str) -> "TokenizerJson":
        """`model`: a directory or a model id. Raises InvalidModel, naming the file that is missing or wrong."""
        directory = find_files(model)
        special, config = (read_json_object(directory / name) or {} for name in _SETTINGS)
        path = directory / "tokenizer.json"
        try:
            if path.is_file():
                tokenizer = Tokenizer.from_file(str(path))
            elif is_tiktoken(directory, config):
                alphabet = {byte: character for character, byte in _byte_alphabet().items()}
                tokenizer = read_tiktoken(directory, config, alphabet)
            else:
                tokenizer = _from_transformers(directory)
        except InvalidModel:
            raise
        except Exception as error:  # the tokenizers package raises bare Exception
            raise InvalidModel(f"the tokenizer of {model} cannot be read: {error}") from error
        made = cls(tokenizer, ChatTemplate.load(directory, special | config))
        made.settings = special | config
        made.directory = str(directory) if path.is_file() else made._write_copy(directory)
        return made

    def encode(self, text: str, add_special_tokens: bool = True, *, at_most: int | None = None) -> list[int]:
        """The token ids of a text.

        `at_most`: the most tokens that the caller can use. Raises NeverFits, without encoding all of the text, if a
        beginning of the text has more than twice as many tokens. (Cutting a text changes only a few tokens.)
        """
        if at_most is not None:
            length = _CHARACTERS_PER_TOKEN * at_most
            while length < len(text):
                if len(self._encode(text[:length], add_special_tokens)) > 2 * at_most:
                    raise NeverFits(
                        f"the prompt has far more than {at_most} tokens in its first {length} characters. Shorten it "
                        f"to at most {at_most} tokens"
                    )
                length *= 4
        return self._encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, equal to the streamed text of the same tokens."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        pieces = self._text_pieces if skip_special_tokens else self._pieces
        if pieces is not None:
            return ByteDetokenizer(pieces)
        return WindowDetokenizer(self._decode_all, self._special if skip_special_tokens else frozenset())

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special; decoded texts leave special tokens out by default."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of a special one; empty for an id without a token."""
        if self._pieces is not None:
            return self._pieces[token_id] if token_id < len(self._pieces) else b""
        token = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        text: str = token.replace("\u2581", " ")  # how sentencepiece writes a space
        return text.encode()

    def _write_copy(self, directory: Path) -> str:
        """A temporary directory with tokenizer.json and the chat template of `directory`. Side processes load from the
        copy, because converting other files with transformers may exceed their limit of CPU time."""
        copy = tempfile.mkdtemp(prefix="coatcheck-tokenizer-")
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        self._tokenizer.save(f"{copy}/tokenizer.json")
        for name in (*_SETTINGS, *_TEMPLATES):
            if (directory / name).is_file():
                Path(copy, name).parent.mkdir(exist_ok=True)
                shutil.copyfile(directory / name, f"{copy}/{name}")
        return copy

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not `encode`, which holds the GIL: a text of 10 MB would stop all streams for seconds.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _pieces(vocabulary: dict[str, int], size: int) -> list[bytes]:
    alphabet = _byte_alphabet()
    pieces = [b""] * size
    for token, index in vocabulary.items():
        # Like the byte-level decoder: a token with a character outside the alphabet is plain text.
        is_encoded = all(character in alphabet for character in token)
        pieces[index] = bytes(alphabet[character] for character in token) if is_encoded else token.encode()
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes are themselves, other bytes are the characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _download(model: str) -> Path:
    if Path(model).is_absolute():  # `coatcheck serve` found it on another host
        raise InvalidModel(
            f"no model directory {model} on {socket.gethostname()}; every node with a router needs its tokenizer under "
            "this path, mounted or copied"
        )
    from huggingface_hub import snapshot_download  # imported late: it is slow, and a directory does not need it

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except Exception as error:  # the hub client raises many kinds of errors
        reason = " ".join(str(error).split())  # the hub client's messages have several lines
        raise InvalidModel(
            f"{model!r} is neither a directory here nor a model that can be downloaded from the hub: {reason}"
        ) from None  # the hub client's own traceback has a hundred lines


def check_sentencepiece(directory: Path) -> None:
    """Raise InvalidModel if the tokenizer is a sentencepiece model alone and that package is missing. Imports neither
    torch nor transformers."""
    files = [file for file in directory.glob("*.model") if file.name != TIKTOKEN_FILE]
    if files and not (directory / "tokenizer.json").is_file() and find_spec("sentencepiece") is None:
        raise InvalidModel(
            f"the tokenizer of {directory} is {files[0].name}, which the package sentencepiece reads: pip install "
            "sentencepiece where routers run, or add the model's tokenizer.json"
        )


def _from_transformers(directory: Path) -> Tokenizer:
    check_sentencepiece(directory)
    from transformers import AutoTokenizer  # imported late: it imports torch

    try:
        # Code in the checkpoint never runs. By default transformers asks at the terminal.
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InvalidModel(
            f"{directory} brings code to read its tokenizer, and code that comes with a checkpoint is never run; add "
            "a tokenizer.json"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise InvalidModel(f"{directory} has no tokenizer.json, and transformers cannot make one from its files")
    return backend
