"""ChatTemplate: a conversation as the one text that its model was trained on.

A model's jinja template runs in jinja's sandbox: it comes with a checkpoint and is not ours to trust. It does not know
tokens.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Never

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from coatcheck.proto.errors import InvalidModel, InvalidRequest

# Variables that a conversation sets by its own fields.
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


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
            # What a conversation may bring beside its messages.
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise InvalidModel(f"the model's chat template does not compile: {error}") from error
        self.source = source
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

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The whole text; raises InvalidRequest for what the template does not read, and with its own words when it
        refuses the conversation."""
        if tools and "tools" not in self.variables:
            raise InvalidRequest("this model's chat template knows no tools; leave tools out")
        for name in arguments or ():
            if name not in self.variables or name in _OURS:
                raise InvalidRequest(f"this model's chat template has no variable {name!r} to set; leave it out")
        try:
            text = self._template.render(
                **self._special_tokens,
                **(arguments or {}),
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
            )
            text.encode()  # half of a surrogate pair, which JSON can escape, is no text
            return text
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
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
