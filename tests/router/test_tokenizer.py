"""A checkpoint's own files: tokenizer and chat template, and what happens when they are wrong."""

import json
from pathlib import Path

import pytest

from coatcheck.proto.errors import InvalidModel, InvalidRequest
from coatcheck.router.tokenizer import TokenizerJson

from .tiny_tokenizer import TEMPLATE, byte_level_tokenizer, write_model

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
    """Then there is none, and that is no error."""
    assert TokenizerJson.load(str(write_model(tmp_path, template=None))).template is None


@pytest.mark.parametrize("reach", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[9].role }}"])
def test_a_template_stays_in_its_sandbox(tmp_path: Path, reach: str) -> None:
    """A template that reaches out, changes what it was given, or fails, refuses the conversation and no more."""
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


def test_the_tables_are_there_before_the_first_request() -> None:
    """A vocabulary is read once, when the tokenizer is made, and not by a request that would wait for it."""

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
