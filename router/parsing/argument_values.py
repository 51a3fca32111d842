"""json_argument(): converts an argument that a model has written without quotation marks to JSON, by the schema."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from coatcheck.router.parsing.pythonic_tool_parser import parse_literal

_MAX_SCHEMAS: Final = 64  # parts of an argument's schema that are searched for types
_TYPES: Final[tuple[tuple[type, tuple[str, ...]], ...]] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number", "integer")),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def json_argument(parameters: Mapping[str, Any], name: str, text: str) -> str:
    """The argument `name` as JSON text. `parameters`: the function's schema."""
    properties = parameters.get("properties")
    return json_value(parameters, properties.get(name) if isinstance(properties, dict) else None, text)


def json_value(parameters: Mapping[str, Any], schema: object, text: str) -> str:
    """The value of `schema`, a part of the function's schema `parameters`, as JSON text.

    A value whose schema has the type "string" is the text itself. Another value is JSON, or a Python literal such as
    True and {'a': 1}, which templates show for values that are no strings. A text that is neither, or of a type that
    the schema does not allow where it allows strings, is a string.
    """
    if isinstance(schema, dict) and schema.get("type") == "string":
        return json.dumps(text, ensure_ascii=False)
    types = find_types(parameters, schema)
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if "string" not in types or _fits(value, types):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    with suppress(ValueError, RecursionError, TypeError):
        if types and not isinstance(value := parse_literal(text), str) and _fits(value, types):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def find_types(parameters: Mapping[str, Any], schema: object) -> set[str]:
    """The types that a value of `schema` may have."""
    types = set[str]()
    for one in _alternatives(parameters, schema):
        named = one.get("type")
        types.update(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
        allowed = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
        if named is None:
            types.update(names[0] for value in allowed for kind, names in _TYPES if type(value) is kind)
    return types


def find_property(parameters: Mapping[str, Any], schema: object, name: str) -> object:
    """The schema of the property `name` of an object of `schema`; None if there is none."""
    for one in _alternatives(parameters, schema):
        properties, others = one.get("properties"), one.get("additionalProperties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
        if isinstance(others, dict):
            return others
    return None


def find_items(parameters: Mapping[str, Any], schema: object) -> object:
    """The schema of the items of a list of `schema`; None if there is none."""
    found = (one.get("items") for one in _alternatives(parameters, schema))
    return next((items for items in found if isinstance(items, dict)), None)


def _fits(value: object, types: set[str]) -> bool:
    return any(not types.isdisjoint(names) for kind, names in _TYPES if type(value) is kind)


def _alternatives(parameters: Mapping[str, Any], schema: object) -> Iterator[dict[str, Any]]:
    """The schema with its alternatives, and with those that it names by references into the function's schema."""
    rest = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not rest:
            return
        one = rest.pop()
        if not isinstance(one, dict):
            continue
        yield one
        for key in ("anyOf", "oneOf", "allOf"):
            rest += one[key] if isinstance(one.get(key), list) else []
        if isinstance(reference := one.get("$ref"), str):
            rest.append(_resolve(parameters, reference))


def _resolve(parameters: Mapping[str, Any], reference: str) -> object:
    """The part of the function's schema that a reference such as "#/$defs/City" names; None if there is none."""
    if not reference.startswith("#/"):
        return None
    found: object = parameters
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
