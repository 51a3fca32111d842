"""properties_of(): the arguments of a function one by one, for formats that do not write them as one JSON object."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema, schema_document

_DEFINITIONS: Final = ("$defs", "definitions")
# What may be at the root of a schema whose properties are enforced one by one.
_ROOT_KEYS: Final = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema",
                     "x-guidance", "strict", *_DEFINITIONS}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Property:
    """`schema`: as the client sent it; `document`: as a document of its own, see schema_document."""

    name: str
    schema: dict[str, Any]
    document: dict[str, Any]
    is_required: bool


def properties_of(function: FunctionSchema, names: re.Pattern[str]) -> list[Property] | None:
    """The properties in the order of the schema; None if any arguments are allowed. `names`: what matches the names
    that the format can write. Raises InvalidRequest for a strict function whose schema cannot be taken apart."""
    schema = function.parameters or {}
    if not function.strict:
        return None
    properties = schema.get("properties", {})
    problem = _find_problem(schema, properties, names)
    if problem:
        raise InvalidRequest(
            f"the parameters of the strict function {function.name!r} have {problem}, which this model's format of "
            "calls cannot enforce; set tool_choice to 'required' or to this function, or remove strict"
        )
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        return None
    definitions: dict[str, Any] = {name: schema[name] for name in _DEFINITIONS if name in schema}
    required = schema.get("required") or []
    return [
        Property(
            name, part, schema_document({**part, **definitions} if any(_references(part)) else part), name in required
        )
        for name, part in properties.items()
    ]


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
