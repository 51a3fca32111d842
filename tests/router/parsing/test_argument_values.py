"""json_argument(): values in tags mean what the function's schema says."""

import json
from typing import Any

import pytest

from coatcheck.router.parsing.argument_values import json_argument

TYPES: dict[str, Any] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "array": {"type": "array"},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "nullable": {"type": ["string", "null"]},
    "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "choice": {"enum": ["1", "2"]},
    "constant": {"const": "1"},
    "named": {"$ref": "#/$defs/Named"},
    "far": {"$ref": "https://example.com/x"},
    "endless": {"$ref": "#/properties/endless"},
    "any": {},
    "wrong": 5,
}
SCHEMA = {"type": "object", "properties": TYPES, "$defs": {"Named": {"type": "string"}}}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("string", "12", "12"),
        ("string", "null", "null"),
        ("string", '"a"', '"a"'),
        ("integer", "12", 12),
        ("integer", "None", "None"),
        ("integer", "1e999", "1e999"),
        ("integer", "007", "007"),
        ("boolean", "True", True),
        ("boolean", "false", False),
        ("boolean", "yes", "yes"),
        ("object", "{'a': True, 'b': [None]}", {"a": True, "b": [None]}),
        ("object", '{"a": {"b": 1.5}}', {"a": {"b": 1.5}}),
        ("object", "{'a': x}", "{'a': x}"),
        ("array", "['a', 1]", ["a", 1]),
        ("array", "[" * 100_000, "[" * 100_000),
        ("optional", "12", "12"),
        ("optional", "null", None),
        ("optional", "None", None),
        ("optional", '"a"', "a"),
        ("optional", "True", "True"),
        ("nullable", "3.5", "3.5"),
        ("either", "12", 12),
        ("either", "a", "a"),
        ("choice", "1", "1"),
        ("constant", "1", "1"),
        ("named", "5", "5"),
        ("far", "5", 5),
        ("endless", "5", 5),
        ("any", "5", 5),
        ("any", "True", "True"),
        ("any", "", ""),
        ("wrong", "[1]", [1]),
        ("missing", "é", "é"),
    ],
)
def test_a_value_has_the_type_of_the_schema(name: str, text: str, value: object) -> None:
    """Where the schema allows strings, a text is one unless it has another type that the schema allows. Python's
    literals, which templates show, are read where JSON is expected."""
    assert json.loads(json_argument(SCHEMA, name, text)) == value


def test_a_schema_may_be_anything() -> None:
    """A schema without properties, or with properties that are none, says nothing."""
    for schema in ({}, {"properties": 5}, {"properties": {"x": {"type": 5, "enum": 3, "anyOf": [4]}}}):
        assert json_argument(schema, "x", "5") == "5"
