"""Chat templates of text models and of multimodal models get the text of every message."""

import json
from pathlib import Path

import pytest

from coatcheck.proto.errors import InvalidModel
from coatcheck.router.text.chat_template import ChatTemplate

# As LLaVA's and Idefics' templates: a content that is a text has no parts, so its text would be missing.
_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}"
    "{% endfor %}{{ ';' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_BOTH = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}\n{% endfor %}"
_CHAT = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (_PARTS, "user: two and two?;assistant: four;assistant: "),
        (_TEXT, "user: two and two?\nassistant: four\n"),
        (_BOTH, "two and two?\nfour\n"),
    ],
)
def test_every_kind_of_template_shows_the_text(source: str, prompt: str) -> None:
    """A template that reads lists of parts gets them; any other gets the text itself."""
    assert ChatTemplate(source, {}).render(_CHAT, True) == prompt


def test_an_empty_content_stays() -> None:
    """A message without a text is rendered too, also by a template that reads parts."""
    assert ChatTemplate(_PARTS, {}).render([{"role": "user", "content": ""}], False) == "user: ;"


def test_the_template_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Older multimodal checkpoints have chat_template.json; tokenizer_config.json comes first."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": _TEXT}))
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None and loaded.source == _TEXT
    loaded = ChatTemplate.load(tmp_path, {"chat_template": _BOTH})
    assert loaded is not None and loaded.source == _BOTH
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(InvalidModel, match="does not hold a JSON object"):
        ChatTemplate.load(tmp_path, {})
