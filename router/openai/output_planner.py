"""OutputPlanner: how the answer to a chat is parsed, and what its grammar must allow before a structure."""

import hashlib
import json
from collections import OrderedDict
from typing import Any, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.parsing.harmony_parser import MARKERS, harmony_rules
from coatcheck.router.parsing.output_format import OutputFormat, find_reasoning_start
from coatcheck.router.parsing.output_parser import ParsingPlan
from coatcheck.router.parsing.reasoning_parser import ReasoningStart, reasoning_rules
from coatcheck.router.text.tokenizer import TokenizerJson

_MAX_PROBES: Final = 64  # results kept


class OutputPlanner:
    """One for each router. `form`: how the model writes reasoning and tool calls."""

    def __init__(self, tokenizer: TokenizerJson, tool_parser: str = "auto") -> None:
        """`tool_parser`: see OutputFormat.detect. Raises InvalidConfig."""
        self._template = tokenizer.template
        self._special_ids = tokenizer.special_ids
        source = self._template.source if self._template is not None else ""
        self.form = OutputFormat.detect(source, self._special_ids, tool_parser)
        self._starts: OrderedDict[str, ReasoningStart] = OrderedDict()

    def make_plan(self, body: ChatRequest) -> ParsingPlan:
        return ParsingPlan(
            self.form,
            self._reasoning_start(body),
            body.tool_mode,
            body.named_function,
            {tool.function.name: tool.function.parameters or {} for tool in body.tools},
            max_calls=None if body.parallel_tool_calls else 1,
            separates_reasoning=body.separate_reasoning,
            shows_reasoning=body.include_reasoning,
        )

    def grammar_prefix(self, plan: ParsingPlan) -> str:
        """Rules for what an answer may have before its structure: reasoning, and with harmony the header of the final
        channel. "" for nothing."""
        if plan.form.tool_format == "openai" and all(marker in self._special_ids for marker in MARKERS):
            return harmony_rules(self._special_ids)
        if plan.form.reasoning is None:
            return ""
        return reasoning_rules(plan.form.reasoning, plan.reasoning_start, self._special_ids)

    def _reasoning_start(self, body: ChatRequest) -> ReasoningStart:
        """Whether the prompt ends inside of reasoning, by rendering a short chat with the same arguments."""
        form, template = self.form.reasoning, self._template
        if form is None or template is None:
            return ReasoningStart.UNDECIDED
        if not body.add_generation_prompt or body.continue_final_message:
            return ReasoningStart.CLOSED
        arguments = body.template_arguments
        # A digest: a client may send arguments of many megabytes.
        key = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()
        if key not in self._starts:

            def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
                return template.render(messages, add_generation_prompt, arguments=arguments)

            try:
                self._starts[key] = find_reasoning_start(form, render)
            except InvalidRequest:  # the template refuses this short chat, or the arguments
                self._starts[key] = ReasoningStart.UNDECIDED
            if len(self._starts) > _MAX_PROBES:
                self._starts.popitem(last=False)
        return self._starts[key]
