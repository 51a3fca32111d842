"""ReasoningVariables: the variables of a chat template that switch reasoning on and off and set how much there is.

Templates have no common name for either. So each variable that a template reads gets the value with the same meaning:

    enable_thinking     a boolean: Qwen 3, GLM 4.5, Hunyuan-A13B, Gemma 4, EXAONE 4, ERNIE 4.5, SmolLM3, Nemotron 3, ...
    thinking            a boolean: DeepSeek V3.1, Granite 3, Kimi K2.5 and K3
    reasoning           a boolean: Command A Reasoning
    thinking_mode       enabled, disabled or adaptive: MiniMax M3. thinking or chat: DeepSeek V4
    thinking_effort     low, medium, high or max: Kimi K3
    thinking_budget     a number of tokens, 0 for none: Seed-OSS
    reasoning_effort    low, medium or high: gpt-oss. none or high: Mistral. no_think, low or high: Hunyuan 3. low,
                        medium or xhigh: Qwen 3.8

An effort that a template does not know becomes the nearest that it knows; of two, the higher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.text.chat_template import ChatTemplate

_LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")
_MODES: Final = (("enabled", "disabled"), ("thinking", "chat"), ("on", "off"))  # of thinking_mode
_COHERE: Final = "<|START_THINKING|>"  # other templates may have a variable `reasoning` of their own
_NO_THINK: Final = "no_think"
# Tokens that a model may reason, for templates that know only a budget. The larger efforts have no limit.
_BUDGETS: Final = {"minimal": 512, "low": 1024, "medium": 4096}
_PROBE: Final[list[dict[str, Any]]] = [{"role": "user", "content": "probe of the effort"}]


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """How much the model reasons, by the fields of a request. `effort`: one of _LEVELS, another name, or "none" for no
    reasoning. `is_enabled`: whether the model reasons; overrides `effort`. `is_adaptive`: the model decides for itself
    whether it reasons. `max_tokens`: of the reasoning. None leaves a setting to the template."""

    effort: str | None = None
    is_enabled: bool | None = None
    is_adaptive: bool = False
    max_tokens: int | None = None

    @property
    def reasons(self) -> bool | None:
        """Whether the model reasons."""
        if self.is_enabled is None and self.effort is not None:
            return self.effort != "none"
        return self.is_enabled


class ReasoningVariables:
    """The variables of one template. `template`: None if it is a client's own, of which nothing is known."""

    def __init__(self, template: ChatTemplate | None, *, is_harmony: bool = False) -> None:
        """`is_harmony`: the model writes gpt-oss' format."""
        self._template = template
        self._is_harmony = is_harmony
        self._known: dict[tuple[str, str], str | None] = {}  # (variable, effort) -> the effort that the template knows

    def switches(self, settings: ReasoningSettings) -> dict[str, Any]:
        """The variables that chat_template_kwargs override."""
        reasons, made = settings.reasons, dict[str, Any]()
        if reasons is not None:
            made |= dict.fromkeys(("enable_thinking", "thinking"), reasons)
            if self._reads("reasoning") and self._template is not None and _COHERE in self._template.source:
                made["reasoning"] = reasons
            if self._reads("thinking_mode"):
                on, off = next((mode for mode in _MODES if self._has(mode[0])), _MODES[0])
                made["thinking_mode"] = on if reasons else off
                if reasons and settings.is_adaptive and self._has("adaptive"):
                    made["thinking_mode"] = "adaptive"
            if not reasons and self._reads("reasoning_effort") and self._has(_NO_THINK):
                made["reasoning_effort"] = _NO_THINK
        if self._reads("thinking_budget"):
            budget = 0 if reasons is False else settings.max_tokens
            budget = _BUDGETS.get(settings.effort or "") if budget is None else budget
            made |= {"thinking_budget": budget} if budget is not None else {}
        if settings.effort is not None and self._reads("thinking_effort"):
            effort = self._nearest("thinking_effort", settings.effort)
            made |= {"thinking_effort": effort} if effort is not None else {}
        return made

    def effort(self, settings: ReasoningSettings) -> dict[str, Any]:
        """The variable `reasoning_effort`, which overrides chat_template_kwargs."""
        if settings.effort is None:
            return {}
        if settings.reasons is False and self._reads("reasoning_effort") and self._has(_NO_THINK):
            return {}  # `switches` sets it
        effort = self._nearest("reasoning_effort", settings.effort)
        return {} if effort is None else {"reasoning_effort": effort}

    def _reads(self, name: str) -> bool:
        return self._template is not None and name in self._template.loaded_names

    def _has(self, text: str) -> bool:
        """Whether the template has a constant with this text."""
        return self._template is not None and text in self._template.constants

    def _nearest(self, variable: str, effort: str) -> str | None:
        """The effort that the template accepts and that is nearest to `effort`. A name that is not in _LEVELS is
        returned as it is. None if `effort` is "none" and the template does not accept "none"."""
        if self._template is None or not self._reads(variable) or effort not in ("none", *_LEVELS):
            return effort
        key = (variable, effort)
        if key not in self._known:
            self._known[key] = self._find_nearest(variable, effort)
        return self._known[key]

    def _find_nearest(self, variable: str, effort: str) -> str | None:
        assert self._template is not None
        if variable == "reasoning_effort" and (self._is_harmony or self._has(_NO_THINK)):
            known = {"low", "medium", "high"} if self._is_harmony else self._template.constants
            return next((one for one in _by_distance(effort) if one in known), effort)
        if self._accepts(variable, effort):
            return effort
        if effort == "none":
            return None  # the switches say so
        return next((one for one in _by_distance(effort) if self._accepts(variable, one)), effort)

    def _accepts(self, variable: str, effort: str) -> bool:
        """Whether the template renders a short chat with this effort."""
        assert self._template is not None
        try:
            self._template.render(_PROBE, True, arguments={"enable_thinking": True, "thinking": True, variable: effort})
        except InvalidRequest:
            return False
        return True


def _by_distance(effort: str) -> Sequence[str]:
    """The efforts, the nearest first; of two at one distance the higher first."""
    place = _LEVELS.index(effort) if effort in _LEVELS else -1
    return sorted(_LEVELS, key=lambda level: (abs(_LEVELS.index(level) - place), -_LEVELS.index(level)))
