"""A request's settings of reasoning set what each family's chat template reads.

The templates here read the variables as the published ones do, and write what comes of them.
"""

from typing import Any

import pytest

from coatcheck.router.text.chat_template import ChatTemplate
from coatcheck.router.text.reasoning_variables import ReasoningSettings, ReasoningVariables

FAMILIES = {
    "qwen 3": "{%- if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}",
    "gemma 4": "{%- if enable_thinking is defined and enable_thinking %}on{% else %}off{% endif %}",
    "deepseek v3.1": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ 'on' if thinking else 'off' }}",
    "command a": "{%- set reasoning = reasoning if reasoning is not undefined else true %}"
    "{{ '<|START_THINKING|>' if reasoning else '<|START_THINKING|><|END_THINKING|>' }}",
    "minimax m3": "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}on{% elif thinking_mode == "
    "'disabled' %}off{% elif thinking_mode == 'adaptive' %}adaptive{% endif %}{% else %}default{% endif %}",
    "deepseek v4": "{%- set mode = thinking_mode|default('chat') -%}{{ 'on' if mode == 'thinking' else 'off' }}"
    "{% if reasoning_effort == 'max' %} max{% endif %}",
    "kimi k3": "{%- if thinking is undefined -%}{%- set thinking = true -%}{%- endif -%}"
    "{%- if thinking_effort is undefined -%}{%- set thinking_effort = 'max' -%}{%- endif -%}"
    "{%- if thinking and thinking_effort not in ['low', 'medium', 'high', 'max'] -%}"
    "{{- raise_exception('Unsupported thinking_effort') -}}{%- endif -%}"
    "{{ thinking_effort if thinking else 'off' }}",
    "seed-oss": "{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 -%}{%- endif -%}"
    "{{ thinking_budget }}",
    "gpt-oss": "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{ reasoning_effort }}",
    "mistral": "{%- set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
    "{%- if reasoning_effort not in ['none', 'high'] %}{{- raise_exception('must be either') }}{%- endif %}"
    "{{ reasoning_effort }}",
    "hunyuan 3": "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'no_think' %}{%- endif %}"
    "{{ reasoning_effort if reasoning_effort in ['low', 'high', 'no_think'] else 'wrong' }}",
    "qwen 3.8": "{%- set effort = reasoning_effort|default('xhigh') %}"
    "{%- if effort not in ['xhigh', 'medium', 'low'] %}{{- raise_exception('effort') }}{%- endif %}"
    "{{ effort if enable_thinking is not false else 'off' }}",
    "another": "{{ reasoning_effort }} {{ reasoning }} {{ enable_thinking }}",
}  # fmt: skip
NONE, LOW, MEDIUM, HIGH = (ReasoningSettings(effort) for effort in ("none", "low", "medium", "high"))
MINIMAL, XHIGH, MAX = (ReasoningSettings(effort) for effort in ("minimal", "xhigh", "max"))
ON, OFF = ReasoningSettings(is_enabled=True), ReasoningSettings(is_enabled=False)
ADAPTIVE, NOTHING = ReasoningSettings(is_enabled=True, is_adaptive=True), ReasoningSettings()
# family -> what the template writes for each setting
WANTED: dict[str, list[tuple[ReasoningSettings, str]]] = {
    "qwen 3": [(NONE, "off"), (LOW, "on"), (OFF, "off"), (ON, "on"), (NOTHING, "on")],
    "gemma 4": [(NONE, "off"), (LOW, "on"), (ADAPTIVE, "on"), (NOTHING, "off")],
    "deepseek v3.1": [(NONE, "off"), (HIGH, "on"), (OFF, "off"), (NOTHING, "off")],
    "command a": [(NONE, "<|START_THINKING|><|END_THINKING|>"), (LOW, "<|START_THINKING|>")],
    "minimax m3": [(NONE, "off"), (MAX, "on"), (ON, "on"), (ADAPTIVE, "adaptive"), (OFF, "off"), (NOTHING, "default")],
    "deepseek v4": [(NONE, "off"), (LOW, "on"), (MAX, "on max"), (ADAPTIVE, "on"), (NOTHING, "off")],
    "kimi k3": [
        (NONE, "off"), (OFF, "off"), (MINIMAL, "low"), (MEDIUM, "medium"), (XHIGH, "max"), (MAX, "max"),
        (NOTHING, "max"),
    ],
    "seed-oss": [
        (NONE, "0"), (OFF, "0"), (LOW, "1024"), (HIGH, "-1"), (NOTHING, "-1"),
        (ReasoningSettings("low", max_tokens=700), "700"), (ReasoningSettings(max_tokens=0), "0"),
    ],
    "gpt-oss": [(NONE, "low"), (HIGH, "high"), (MAX, "high"), (NOTHING, "medium")],
    "mistral": [(NONE, "none"), (LOW, "high"), (HIGH, "high"), (MAX, "high"), (NOTHING, "none")],
    "hunyuan 3": [(NONE, "no_think"), (OFF, "no_think"), (MINIMAL, "low"), (MEDIUM, "high"), (MAX, "high")],
    "qwen 3.8": [(NONE, "off"), (MINIMAL, "low"), (MEDIUM, "medium"), (HIGH, "xhigh"), (MAX, "xhigh"), (OFF, "off")],
    "another": [(LOW, "low  True"), (NONE, "none  False"), (ReasoningSettings("ultra"), "ultra  True")],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_gets_what_it_reads(family: str) -> None:
    """Each setting has the meaning that the family gives to its own variables."""
    template = ChatTemplate(FAMILIES[family], {})
    variables = ReasoningVariables(template, is_harmony=family == "gpt-oss")
    for settings, wanted in WANTED[family]:
        arguments: dict[str, Any] = variables.switches(settings) | variables.effort(settings)
        assert template.render([{"role": "user", "content": "hello"}], True, arguments=arguments) == wanted, settings


def test_an_effort_that_no_one_knows_is_not_changed() -> None:
    """So the client gets the template's own words."""
    template = ChatTemplate("{{ raise_exception('no') if reasoning_effort is defined }}", {})
    assert ReasoningVariables(template).effort(HIGH) == {"reasoning_effort": "high"}
    assert ReasoningVariables(None).effort(NONE) == {"reasoning_effort": "none"}
    assert ReasoningVariables(None).switches(NONE) == {"enable_thinking": False, "thinking": False}
