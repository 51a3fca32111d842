"""The fields that ask for structured output, in OpenAI's form and in vLLM's and SGLang's; all become one Grammar."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar


class JsonSchema(BaseModel):
    """`name` and `description` have no effect, and the schema is always enforced, whatever `strict` is."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; "text" does not constrain."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`; one field may be set."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def to_grammars(self) -> list[Grammar]:
        """A grammar for each field that is set."""
        found = []
        if self.json_ is not None:
            found.append(schema_grammar(self.json_))
        if self.regex is not None:
            found.append(Grammar("regex", self.regex))
        if self.choice is not None:
            found.append(Grammar.of_choices(self.choice))
        if self.grammar is not None:
            found.append(Grammar("grammar", self.grammar))
        if self.json_object:
            found.append(schema_grammar({"type": "object"}))
        return found


def select_grammar(response_format: ResponseFormat | None, *others: StructuredOutputs | None) -> Grammar | None:
    """The only grammar among all fields, or None; raises InvalidRequest if there are several."""
    found = [grammar for outputs in others if outputs is not None for grammar in outputs.to_grammars()]
    if response_format is not None and response_format.type == "json_object":
        found.append(schema_grammar({"type": "object"}))
    if response_format is not None and response_format.type == "json_schema":
        wrapper = response_format.json_schema
        if wrapper is None or wrapper.schema_ is None:
            raise InvalidRequest("response_format.json_schema.schema is missing; give the schema, or use json_object")
        found.append(schema_grammar(wrapper.schema_))
    if len(found) > 1:
        raise InvalidRequest("structured output is requested in several ways; keep one of them")
    return found[0] if found else None


def schema_grammar(schema: str | dict[str, Any]) -> Grammar:
    """`schema`: a JSON schema, or its text."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
