"""keyword_arguments(): the arguments of a call in Python's form, such as city="Bonn", days=3.

Values are JSON, whose literals PythonicToolParser reads as well: true is True and null is None.
"""

import re
from typing import Final

from coatcheck.router.tool_grammars.call_grammar import FunctionSchema
from coatcheck.router.tool_grammars.input_grammar import INPUT, CustomFunction
from coatcheck.router.tool_grammars.properties import properties_of
from coatcheck.router.tool_grammars.rules import Rules

_NAMES: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def keyword_arguments(index: int, function: FunctionSchema, rules: Rules) -> str:
    """The rule for the arguments of function number `index`: in the order of the schema, with commas between them.
    Raises InvalidRequest for a schema that cannot be enforced."""
    if isinstance(function, CustomFunction) and function.input_grammar is not None:
        return f'"{INPUT}=" {function.input_grammar.json_rule(rules)}'
    properties = properties_of(function, _NAMES)
    if properties is None:
        one = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {rules.schema({})}'
        return f'({one} (", " {one})*)?'
    if not properties:
        return ""
    first = rest = ""  # the rules for the arguments from here on, if none is written yet, and if one is
    for place, argument in reversed(list(enumerate(properties))):
        value = f'"{argument.name}=" {rules.schema(argument.document)}'
        later = f'", " {value}' if argument.is_required else f'(", " {value})?'
        begun = [f"{value} {rest}"] + ([] if argument.is_required or not first else [first])
        first = rules.rule(f"first_{index}_{place}", " | ".join(begun))
        rest = rules.rule(f"rest_{index}_{place}", f"{later} {rest}")
    return first if any(argument.is_required for argument in properties) else f"({first})?"
