"""Grammars that are large, deep, ambiguous or endless: each would crash or block a process without limits."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from coatcheck.proto.grammar import Grammar

_STRING: Final = '{"type":"string"}'
_HEX: Final = [f"{number * 2654435761 % 2**64:016x}" for number in range(4096)]


def _schema(schema: Any) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _nested(opening: str, closing: str, depth: int) -> Grammar:
    return _schema(opening * depth + _STRING + closing * depth)


def _references(depth: int, **kind: Any) -> Grammar:
    """A chain of definitions, each of which refers to the next one."""
    next_one = [{"$ref": f"#/$defs/a{number + 1}"} for number in range(depth)]
    definitions = {f"a{number}": {**kind, "anyOf": [one]} for number, one in enumerate(next_one)}
    return _schema({"$defs": {**definitions, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"})


def _chain(depth: int, form: str, name: str = "r") -> Grammar:
    """A chain of rules or terminals. `form`: the body of a rule, with {} for the name of the next one."""
    rules = "".join(f"{name}{number}: {form.format(f'{name}{number + 1}')}\n" for number in range(depth))
    return Grammar("grammar", f'start: {name}0\n{rules}{name}{depth}: "a"\n')


def _parentheses(kind: Any, form: str, depth: int) -> Grammar:
    """`form`: the grammar, with {} for the parentheses."""
    inner = "a" if kind == "regex" or "/" in form else '"a"'
    return Grammar(kind, form.format("(" * depth + inner + ")" * depth))


# With a byte-level vocabulary a rank soon takes 0.1 s for each token of this grammar.
AMBIGUOUS: Final = Grammar("grammar", 'start: s\ns: s s | s s s | s s s s | "a" | "b" | ""\n')
# Compiles on the 2 MiB of stack that the router's check has, and overflows a stack of 1 MiB.
DEEP: Final = _chain(600, "{}")

GRAMMARS: Final[dict[str, Callable[[], Grammar]]] = {
    **{
        f"{depth} nested {name}": partial(_nested, opening, closing, depth)
        for name, opening, closing in (
            ("properties", '{"type":"object","properties":{"a":', "}}"), ("items", '{"type":"array","items":', "}"),
            ("anyOf", '{"anyOf":[', "]}"), ("not", '{"not":', "}"),
        )
        for depth in (60, 6000)
    },
    "a nested const": lambda: _schema('{"const":' + "[" * 6000 + "]" * 6000 + "}"),
    "300 references": lambda: _references(300),
    "3,000 references": lambda: _references(3000),
    "a reference to itself": lambda: _schema({"$ref": "#"}),
    "references in a circle": lambda: _schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "allOf of itself": lambda: _schema(
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"}),
    "an object that needs itself": lambda: _schema(
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
    "22,000 enum values": lambda: _schema({"enum": [f"v{number}" for number in range(22_000)]}),
    "5,000 enum objects": lambda: _schema({"enum": [{"a": [number, {"b": number}]} for number in range(5000)]}),
    "4,096 choices": lambda: Grammar.of_choices(_HEX),
    "a choice of 200,000 letters": lambda: Grammar.of_choices(["a" * 200_000, "b"]),
    **{
        f"{keyword} {count}": partial(_schema, {**kind, keyword: count})
        for keyword, kind in (
            ("minLength", {"type": "string"}), ("maxLength", {"type": "string"}),
            ("minItems", {"type": "array", "items": {"type": "integer"}}),
            ("maxItems", {"type": "array", "items": {"type": "integer"}}),
            ("minProperties", {"type": "object"}), ("maxProperties", {"type": "object"}),
        )
        for count in (10**9, 2**63)
    },
    **{
        f"regex {pattern}": partial(Grammar, "regex", pattern)
        for pattern in (
            "a{1,1000000000}", "a{1000000000,}", "a{100000,}", "a{1,99999999999}", "(a+)+$", ".*a.{25}", ".*a.{100}",
            "(((a{1,1000}){1,1000}){1,1000}){1,1000}", r"\p{L}{1,200}\w{1,200}", "(.{0,300}x){0,300}", r"[^\s\S]",
        )
    },
    "a pattern that repeats": lambda: _schema({"type": "string", "pattern": "^(ab|c){1,1000000000}$"}),
    "a?…a…": lambda: Grammar("regex", "a?" * 1000 + "a" * 1000),
    **{
        f"{depth} parentheses in {name}": partial(_parentheses, kind, form, depth)
        for name, kind, form in (
            ("a regex", "regex", "{}"), ("a rule", "grammar", "start: {}"),
            ("a terminal", "grammar", "start: A\nA: {}"),
            ("a rule's regex", "grammar", "start: /{}/"), ("GBNF", "grammar", "root ::= {}"),
        )
        for depth in (10_000,)
    },
    "600 rules in a chain": lambda: DEEP,
    "600 rules in a longer chain": lambda: _chain(600, '{} "b"'),
    "8,000 rules in a chain": lambda: _chain(8000, "{}"),
    "400 terminals in a chain": lambda: _chain(400, '({} "b" | "c")*', "R"),
    "8,000 terminals in a chain": lambda: _chain(8000, '{} "b"', "R"),
    "4,000 rules, each twice the next": lambda: Grammar(
        "grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(4000)) + 'r4000: "a"\n'),
    "20,000 rules": lambda: Grammar("grammar", "start: r1\n" + "".join(f'r{n}: "a"\n' for n in range(20_000))),
    "8,000 alternatives": lambda: Grammar(
        "grammar", "start: " + " | ".join(f"r{n}" for n in range(8000)) + "\n"
        + "".join(f'r{n}: "{n:x}"\n' for n in range(8000))),
    "left recursion": lambda: Grammar("grammar", 'start: start "a" | "a"\n'),
    "left recursion without an end": lambda: Grammar("grammar", "start: start\n"),
    "right recursion without an end": lambda: Grammar("grammar", 'start: "a" start\n'),
    "a terminal of itself": lambda: Grammar("grammar", 'start: A\nA: A "a" | "b"\n'),
    "an ambiguous rule": lambda: AMBIGUOUS,
    "3,000 rules that may be empty": lambda: Grammar(
        "grammar", "start: " + " ".join(f"r{n}?" for n in range(3000)) + "\n"
        + "".join(f'r{n}: "{n:x}"\n' for n in range(3000))),
    "two regexes at once": lambda: Grammar("grammar", "start: A\nA: /(.*a.{18})/ & /(.*b.{19})/\n"),
    "one regex and not another": lambda: Grammar("grammar", "start: A\nA: /(.*a.{18}.*)/ & ~/(.*b.{19}.*)/\n"),
    "a large divisor": lambda: _schema({"type": "integer", "multipleOf": 999_983}),
    "six divisors": lambda: _schema(
        {"type": "integer", "allOf": [{"multipleOf": divisor} for divisor in (7, 11, 13, 17, 19, 23)]}),
    "500 optional properties": lambda: _schema({"properties": {f"a{n}": {"type": "string"} for n in range(500)}}),
    "8,000 properties": lambda: _schema({"properties": {f"a{n}": {"type": "string"} for n in range(8000)}}),
    "50 patterns at once": lambda: _schema({"type": "string", "allOf": [{"pattern": f"{n:x}z"} for n in range(50)]}),
    "40 anyOf in an allOf": lambda: _schema({"allOf": [{"anyOf": [
        {"properties": {f"{side}{n}": {"type": "string"}}, "required": [f"{side}{n}"]} for side in "ab"
    ]} for n in range(40)]}),
    "8,000 items": lambda: _schema({"type": "array", "prefixItems": [{"type": "integer"}] * 8000}),
    "a number of 4,000 digits": lambda: _schema('{"type":"integer","minimum":' + "9" * 4000 + "}"),
    "half a character": lambda: Grammar("regex", "\ud800"),
}  # fmt: skip
