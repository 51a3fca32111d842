"""OutputPlanner: where in an answer its reasoning begins and ends, by the model's chat template and tokenizer."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.sampling import ReasoningLimit
from coatcheck.router.parsing.harmony_parser import ANALYSIS, END, MARKERS, harmony_rules
from coatcheck.router.parsing.output_format import OutputFormat, find_reasoning_start, reasoning_start_of
from coatcheck.router.parsing.reasoning_parser import ReasoningStart, reasoning_rules
from coatcheck.router.text.reasoning_variables import ReasoningVariables
from coatcheck.router.text.tokenizer import TokenizerJson

_MAX_PROBES: Final = 64  # results kept


class OutputPlanner:
    """One for each router. `output_format`: how the model writes reasoning and tool calls. `reasoning_variables`: those
    of its chat template."""

    def __init__(self, tokenizer: TokenizerJson, tool_parser: str = "auto") -> None:
        """`tool_parser`: see OutputFormat.detect. Raises InvalidConfig."""
        self._tokenizer = tokenizer
        template = tokenizer.template
        source = f"{template.source}\n{template.for_tools.source}" if template is not None else ""
        self.output_format = OutputFormat.detect(source, tokenizer.special_ids, tool_parser)
        self.reasoning_variables = ReasoningVariables(template, is_harmony=self.output_format.tool_format == "openai")
        self._starts: OrderedDict[str, ReasoningStart] = OrderedDict()

    def reasoning_start(self, arguments: Mapping[str, Any], *, begins_message: bool) -> ReasoningStart:
        """Where a chat's prompt ends, found by rendering a short chat with the same `arguments`. `begins_message`: the
        output begins a message of the assistant."""
        markers, template = self.output_format.reasoning, self._tokenizer.template
        if markers is None or template is None:
            return ReasoningStart.UNDECIDED
        if not begins_message:
            return ReasoningStart.CLOSED
        # A digest: a client may send arguments of many megabytes.
        key = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()
        if key not in self._starts:

            def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
                return template.render(messages, add_generation_prompt, arguments=arguments)

            try:
                self._starts[key] = find_reasoning_start(markers, render)
            except InvalidRequest:  # the template refuses this short chat, or the arguments
                self._starts[key] = ReasoningStart.UNDECIDED
            if len(self._starts) > _MAX_PROBES:
                self._starts.popitem(last=False)
        return self._starts[key]

    def reasoning_start_of_text(self, prompt: str) -> ReasoningStart:
        """OPEN if a prompt that the client has written ends inside of reasoning, else UNDECIDED: whether earlier
        messages had reasoning does not matter for the answer."""
        markers = self.output_format.reasoning
        start = ReasoningStart.UNDECIDED if markers is None else reasoning_start_of(markers, prompt)
        return start if start is ReasoningStart.OPEN else ReasoningStart.UNDECIDED

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template shows tools."""
        template = self._tokenizer.template
        return template is not None and "tools" in template.for_tools.variables

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the model's special tokens by their text."""
        return self._tokenizer.special_ids

    def grammar_prefix(self, start: ReasoningStart) -> str:
        """Rules for what an answer may have before its structure: reasoning, and with harmony the header of the final
        channel. "" for nothing."""
        special_ids = self._tokenizer.special_ids
        if self.output_format.tool_format == "openai" and all(marker in special_ids for marker in MARKERS):
            return harmony_rules(special_ids)
        if self.output_format.reasoning is None:
            return ""
        return reasoning_rules(self.output_format.reasoning, start, special_ids)

    def reasoning_limit(self, max_tokens: int, start: ReasoningStart) -> ReasoningLimit | None:
        """The limit in tokens of the model's markers; None if the model does not mark its reasoning, or the prompt has
        ended it."""
        markers = self.output_format.reasoning
        if self.output_format.tool_format == "openai":
            return ReasoningLimit(max_tokens, self._marker_ids(ANALYSIS), self._marker_ids(END))
        if markers is None or start is ReasoningStart.CLOSED:
            return None
        opening = self._marker_ids(markers.opening) if start is ReasoningStart.UNDECIDED else ()
        return ReasoningLimit(max_tokens, opening, self._marker_ids(markers.end))

    def _marker_ids(self, marker: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(marker, add_special_tokens=False))
