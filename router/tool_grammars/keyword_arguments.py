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
    values = [(f'"{one.name}=" {rules.schema(one.document)}', one.is_required) for one in properties]
    return rules.listed(str(index), values, '", "')
