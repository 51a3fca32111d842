"""ChatTemplate: a conversation as the one text that its model was trained on.

A model's jinja template runs in jinja's sandbox: it comes with a checkpoint and is not ours to trust. It does not know
tokens.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Never

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..proto.errors import InvalidModel, InvalidRequest


class ChatTemplate:
    """One model's template with its special tokens; safe to call from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises InvalidModel when the source does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidModel(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path, tokenizer_config: dict[str, Any]) -> "ChatTemplate | None":
        """From chat_template.jinja or tokenizer_config.json; None for a model that has none."""
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several by name
            try:
                named = {entry["name"]: entry["template"] for entry in source}
            except (KeyError, TypeError):
                named = {"": source}  # refused below
            source = named.get("default", next(iter(named.values()), None))
        if not source:
            return None
        if not isinstance(source, str):
            raise InvalidModel("tokenizer_config.json's chat_template is neither a text nor a list of named ones")
        special = {name: _text_of(token) for name, token in tokenizer_config.items() if name.endswith("_token")}
        return cls(source, {name: token for name, token in special.items() if token is not None})

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The whole text; raises InvalidRequest with the template's own words when it refuses the conversation."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the model's chat template refuses this conversation: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply part of the text."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja's own escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _text_of(token: object) -> str | None:
    """A special token is written as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
