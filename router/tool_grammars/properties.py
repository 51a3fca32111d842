"""properties_of(): the arguments of a function one by one, for formats that do not write them as one JSON object."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema, UnenforcedParameters, schema_document

_DEFINITIONS: Final = ("$defs", "definitions")
# What may be at the root of a schema whose properties are enforced one by one.
_ROOT_KEYS: Final = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema",
                     "x-guidance", "strict", *_DEFINITIONS}  # fmt: skip
NOTES: Final = ("title", "description", "default", "examples")  # keywords that do not constrain
_LIST_KEYS: Final = {"type", "items", *NOTES}
_MAX_REFERENCES: Final = 16


@dataclass(frozen=True, slots=True)
class Property:
    """`schema`: as the client sent it. `definitions`: those to which it may refer."""

    name: str
    schema: dict[str, Any]
    definitions: dict[str, Any]
    is_required: bool

    @property
    def document(self) -> dict[str, Any]:
        """The schema as a document of its own; see schema_document."""
        whole = {**self.schema, **self.definitions} if any(_references(self.schema)) else self.schema
        return schema_document(whole)


def properties_of(function: FunctionSchema, names: re.Pattern[str]) -> list[Property] | None:
    """The properties in the order of the schema; None if any arguments are allowed. `names`: what matches the names
    that the format can write. Raises UnenforcedParameters for a strict function whose schema cannot be taken apart."""
    schema = function.parameters or {}
    if not function.strict:
        return None
    properties = schema.get("properties", {})
    problem = _find_problem(schema, properties, names) or _find_far_reference(schema)
    if problem:
        raise UnenforcedParameters(function.name, problem)
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        return None
    return _split(schema, definitions_of(schema))


def nested_properties(
    schema: dict[str, Any], definitions: dict[str, Any], names: re.Pattern[str]
) -> list[Property] | None:
    """As properties_of, for an object within a function's schema, which has `definitions`. None if the object cannot be
    written property by property."""
    if (
        schema.get("type") != "object"
        or "properties" not in schema
        or _find_problem(schema, schema["properties"], names)
    ):
        return None
    return _split(schema, definitions)


def item_of(schema: dict[str, Any], definitions: dict[str, Any]) -> Property | None:
    """Each item of a list, as a property of the name "item". None if the schema is not that of a list of one kind of
    items and of any length."""
    items = schema.get("items")
    if schema.get("type") != "array" or not isinstance(items, dict) or schema.keys() - _LIST_KEYS:
        return None
    return Property("item", items, definitions, is_required=True)


def resolve_reference(schema: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema at the end of the references that `schema` consists of, or `schema` itself if it is no reference or
    the end is not found. `parameters`: the function's schema, in which references are looked up."""
    found = schema
    for _ in range(_MAX_REFERENCES):
        reference = found.get("$ref")
        if not isinstance(reference, str) or found.keys() - {"$ref", *NOTES}:
            return found
        target: object = parameters
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return found
        found = target
    return schema


@contextmanager
def refuse_deep_schemas() -> Iterator[None]:
    """Turns a RecursionError into InvalidRequest. References can nest a schema deeper than a body may be."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest(
            "the parameters of the strict functions are nested too deeply for this model's format of calls; send "
            "flatter schemas, or remove strict"
        ) from None


def definitions_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The definitions of a function's schema, by keyword."""
    return {name: schema[name] for name in _DEFINITIONS if name in schema}


def text_choices(schema: dict[str, Any]) -> list[str]:
    """The only texts that a string may be; none if it may be any."""
    if schema.get("type") != "string":
        return []
    found = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return [text for text in found if isinstance(text, str)]


def _split(schema: dict[str, Any], definitions: dict[str, Any]) -> list[Property]:
    required = frozenset(schema.get("required") or [])
    properties = schema.get("properties", {}).items()
    return [Property(name, part, definitions, is_required=name in required) for name, part in properties]


def _find_problem(schema: dict[str, Any], properties: object, names: re.Pattern[str]) -> str:
    """The part of a schema that cannot be enforced property by property, in words; "" if there is none."""
    if other := sorted(schema.keys() - _ROOT_KEYS):
        return f"{other[0]!r} at their root"
    if not isinstance(properties, dict) or not all(isinstance(part, dict) for part in properties.values()):
        return "properties that are no schemas"
    if wrong := next((name for name in properties if not names.fullmatch(name)), None):
        return f"the name {wrong[:40]!r}"
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        return "'required' that is no list of names of properties"
    return ""


def _find_far_reference(schema: dict[str, Any]) -> str:
    """A reference at any depth that is not into the definitions, in words; "" if there is none."""
    local = tuple(f"#/{name}/" for name in _DEFINITIONS)
    if far := next((ref for ref in _references(schema) if not ref.startswith(local)), None):
        return f"the reference {far[:80]!r}"
    return ""


def _references(value: object) -> Iterator[str]:
    """The references at all depths of a schema."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            if isinstance(reference := one.get("$ref"), str):
                yield reference
            rest += one.values()
        elif isinstance(one, list):
            rest += one
