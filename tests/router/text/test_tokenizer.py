"""A checkpoint's own files: tokenizer and chat template, and what happens when they are wrong."""

import gc
import json
import socket
import threading
import time
from pathlib import Path

import pytest
import regex

from coatcheck.proto.errors import InvalidModel, InvalidRequest, NeverFits
from coatcheck.router.text import tokenizer as tokenizer_module
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.tiny_tokenizer import TEMPLATE, byte_level_tokenizer, write_model
from tests.workers.checkpoint.published_checkpoints import write_tiktoken

USER = [{"role": "user", "content": "hi <b>"}]


def test_a_template_file_wins_over_the_configured_one(tmp_path: Path) -> None:
    """chat_template.jinja is where newer checkpoints keep it; `generation` marks are part of the text."""
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ bos_token }}"
    )
    template = TokenizerJson.load(str(tmp_path)).template
    assert template is not None
    assert template.render(USER, True) == '{"role": "user", "content": "hi <b>"}<s>'


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    """Some checkpoints name their templates."""
    write_model(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = TokenizerJson.load(str(tmp_path)).template
    assert template is not None and template.render(USER, True) == "plain"


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    """A model without a chat template loads, and its template is None."""
    assert TokenizerJson.load(str(write_model(tmp_path, template=None))).template is None


@pytest.mark.parametrize("reach", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[9].role }}"])
def test_a_template_stays_in_its_sandbox(tmp_path: Path, reach: str) -> None:
    """A template that reaches out of the sandbox, changes its input, or fails refuses the conversation and does no
    harm."""
    template = TokenizerJson.load(str(write_model(tmp_path, template=reach))).template
    assert template is not None
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        template.render(USER, True)


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", "{}"), ("tokenizer.json", "not json"), ("tokenizer_config.json", "["),
    ("tokenizer_config.json", "[]"), ("chat_template.jinja", "{% for %}"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path: Path, file: str, content: str) -> None:
    """A broken checkpoint is an InvalidModel that says which part."""
    write_model(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(InvalidModel):
        TokenizerJson.load(str(tmp_path))


def test_a_path_that_is_not_mounted_here_is_named() -> None:
    """An absolute path is not taken for a model id. The message names the host: other hosts may have the path."""
    with pytest.raises(InvalidModel, match=f"no model directory /models/m on {socket.gethostname()}.* mounted or cop"):
        TokenizerJson.load("/models/m")


def test_side_processes_load_a_converted_tokenizer_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that transformers made has a directory with tokenizer.json, which is deleted with the tokenizer."""
    (write_model(tmp_path) / "tokenizer.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_module, "_from_transformers", lambda directory: byte_level_tokenizer())
        tokenizer = TokenizerJson.load(str(tmp_path))
    assert tokenizer.directory is not None
    copy = Path(tokenizer.directory)
    again = TokenizerJson.load(str(copy))
    assert again.encode("the quick fox") == tokenizer.encode("the quick fox")
    assert again.template is not None and tokenizer.template is not None
    assert again.template.render(USER, True) == tokenizer.template.render(USER, True)
    del tokenizer
    gc.collect()
    assert not copy.exists()


def test_the_tables_are_there_before_the_first_request() -> None:
    """The vocabulary is read once, when the tokenizer is made, and not by a request."""

    class Counted:
        """A tokenizer that counts how often its vocabulary is read."""

        def __init__(self) -> None:
            self.real, self.reads = byte_level_tokenizer(), 0

        def __getattr__(self, name: str) -> object:
            self.reads += name in ("get_vocab", "get_added_tokens_decoder")
            return getattr(self.real, name)

    counted = Counted()
    tokenizer = TokenizerJson(counted, None)  # type: ignore[arg-type]  # it quacks
    made = counted.reads
    assert tokenizer.decode(tokenizer.encode("a fox")) == tokenizer.decode(tokenizer.encode("a fox"), False) == "a fox"
    assert tokenizer.vocab_size > 256 and counted.reads == made


def test_the_end_of_a_turn_is_written_as_the_model_has_it(model_directory: Path) -> None:
    """Special tokens reach the template by name, also where the configuration writes them as objects."""
    template = TokenizerJson.load(str(model_directory)).template
    assert template is not None and "eos_token" in TEMPLATE
    assert template.render(USER, False) == "<|user|>hi <b></s>"
    assert template.render(USER, True).endswith("<|assistant|>")


def test_a_long_text_holds_nobody_up(tokenizer: TokenizerJson) -> None:
    """Other threads, such as the event loop's, run while a text of 300 kB is encoded."""
    encoding = threading.Thread(target=tokenizer.encode, args=("abcd " * 60_000,))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 3  # else it would be one, or two


def test_a_text_far_too_long_is_refused_after_its_beginning(tokenizer: TokenizerJson) -> None:
    """Time and memory do not grow with the rest of the text; a text that may fit is encoded whole."""
    text = "the quick brown fox " * 1_000
    whole = tokenizer.encode(text)
    assert tokenizer.encode(text, at_most=len(whole)) == whole
    assert tokenizer.encode(text, at_most=len(whole) * 2 // 3) == whole  # for others to refuse, with the exact number
    with pytest.raises(NeverFits, match="Shorten it to at most 100 tokens"):
        tokenizer.encode(text * 1_000, at_most=100)


@pytest.mark.parametrize("template", [5, {"a": "b"}, [1], [{"name": "x"}]], ids=str)
def test_a_template_of_another_kind_is_refused(tmp_path: Path, template: object) -> None:
    """A chat template that is no text is the model's error."""
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidModel, match="chat_template"):
        TokenizerJson.load(str(tmp_path))


def test_kimis_byte_pairs_are_read_without_its_code(tmp_path: Path) -> None:
    """The ids of texts equal those of the definition: split by the pattern, then merge the pair of lowest rank until
    none is left. Special tokens have their ids, and texts come back as they were."""
    ranks = {token: rank for rank, token in enumerate(write_tiktoken(tmp_path))}
    tokenizer = TokenizerJson.load(str(tmp_path))

    def merge(piece: bytes) -> list[int]:
        parts = [bytes([byte]) for byte in piece]
        while True:
            pairs = [(ranks.get(parts[place] + parts[place + 1], 1 << 30), place) for place in range(len(parts) - 1)]
            if not pairs or min(pairs)[0] == 1 << 30:
                return [ranks[part] for part in parts]
            place = min(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]

    for text in (
        "the quick fox's 12345 and THE FOXing", "你好 the你好and", " é\n\n  ...the", "  \t x\r\n\n y ", "Ünï'S étéand",
    ):  # fmt: skip
        pieces = regex.findall(_KIMI_PATTERN, text, regex.V1)
        assert "".join(pieces) == text
        assert tokenizer.encode(text) == [token for piece in pieces for token in merge(piece.encode())]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_user|>the<|im_end|>") == [387, ranks[b"the"], 386]
    assert tokenizer.special_ids["<|reserved_token_639|>"] == 639 and tokenizer.vocab_size == 640
    (tmp_path / "tiktoken.model").write_text("!!! 0\n")
    with pytest.raises(InvalidModel, match="tiktoken.model or tokenizer_config.json is broken"):
        TokenizerJson.load(str(tmp_path))


def test_code_that_reads_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that only the repository's code reads is refused, without a question at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen"}))
    (tmp_path / "qwen.tiktoken").write_text("AA== 0\n")
    settings = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["ours.QWenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "ours.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(InvalidModel, match="brings code to read its tokenizer, and code .* is never run; add a"):
        TokenizerJson.load(str(tmp_path))


def test_a_sentencepiece_model_names_the_package_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sentencepiece a tokenizer.model alone is refused with the package to install."""
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(InvalidModel, match=r"is tokenizer.model, which the package sentencepiece reads: pip install"):
        TokenizerJson.load(str(tmp_path))


_KIMI_PATTERN = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*"
    r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
