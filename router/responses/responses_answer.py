"""ResponsesAnswer: makes the response object of /v1/responses, or the events of a stream, from GenerateService's
events."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import FINISH_REASON_LENGTH, Delta, GenerateEvent, GenerateResponse
from coatcheck.proto.stubs.coatcheck_pb2 import Final as FinalEvent
from coatcheck.router.http.errors import report_error
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import ResponseHead, timing_metrics
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan, ReasoningCounter
from coatcheck.router.parsing.parts import Part, Reasoning, ToolCallDelta
from coatcheck.router.responses.text_logprobs import Logprobs, TextLogprobs

OnEnd = Callable[[dict[str, Any], list[Part]], None]


@dataclass(slots=True)
class _OutputItem:
    """An item of the output so far. `first`: its first part. `texts`: the texts, or the arguments, of all its parts."""

    first: Part
    texts: list[str]
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of the item's tokens, if it is a text

    def whole(self) -> Part:
        """The item as one part."""
        text = "".join(self.texts)
        if isinstance(self.first, ToolCallDelta):
            return replace(self.first, arguments=text)
        return replace(self.first, text=text)


class ResponsesAnswer:
    """The ResponseRenderer of one response. `settings`: fields of the response that repeat the request. When the
    response is complete, `on_end` gets the response object and its parts, one for each item. `namespaces`: see
    names_in_namespaces. `has_logprobs`: the texts have log-probabilities."""

    def __init__(
        self,
        head: ResponseHead,
        settings: dict[str, Any],
        plan: ParsingPlan,
        on_end: OnEnd,
        formatter: LogprobsFormatter,
        *,
        namespaces: Mapping[str, tuple[str, str]],
        has_logprobs: bool = False,
    ) -> None:
        self._head = head
        self._namespaces = namespaces
        self._settings = settings
        self._parser = OutputParser(plan)
        self._logprobs: TextLogprobs | None = None
        skips = not plan.keeps_special_tokens
        self._counter: ReasoningCounter | None = None
        if plan.output_format.has_reasoning:
            self._counter = ReasoningCounter(self._parser, formatter.offsets(skips, 0))
        if has_logprobs:
            self._logprobs = TextLogprobs(self._parser, formatter, skips_special_tokens=skips)
        self._on_end = on_end
        self._items: list[_OutputItem] = []
        self._was_cut = False
        self._final = FinalEvent()
        self._sequence = 0

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        (response,) = responses
        (choice,) = response.choices
        for part, logprobs in self._parse(choice, is_last=True):
            self._add(part, logprobs)
        self._was_cut = choice.finish_reason == FINISH_REASON_LENGTH
        self._final = response.final
        return self._finish()

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        return 0  # `on_end` must run in this process; ResponsesRoutes limits the log-probabilities

    def make_chunk(self, prompt_index: int, event: GenerateEvent) -> bytes:
        match event.WhichOneof("event"):
            case "started":
                response = self._response("in_progress")
                return self._event("response.created", response=response) + self._event(
                    "response.in_progress", response=response
                )
            case "delta":
                parsed = self._parse(event.delta, is_last=bool(event.delta.finish_reason))
                self._was_cut = event.delta.finish_reason == FINISH_REASON_LENGTH
                return b"".join(self._part_events(part, logprobs) for part, logprobs in parsed)
            case "final":
                self._final = event.final
        return b""

    def make_end(self) -> bytes:
        ended = self._end_item("incomplete" if self._was_cut else "completed")
        response = self._finish()
        return ended + self._event(f"response.{response['status']}", response=response)

    def make_error(self, error: Exception) -> bytes:
        report = report_error(error)
        response = self._response("failed")
        code = "rate_limit_exceeded" if report.status == 429 else "server_error"
        response["error"] = {"code": code, "message": report.message}
        return self._event("response.failed", response=response)

    def _parse(self, delta: Delta, *, is_last: bool) -> list[tuple[Part, Logprobs]]:
        """The next parts, each with the log-probabilities of its tokens if it is a text."""
        if self._counter is not None:
            self._counter.feed(delta.token_ids)
        if self._logprobs is not None:
            return self._logprobs.feed_delta(delta, is_last=is_last)
        return [(part, []) for part in self._parser.feed_delta(delta.text, is_last=is_last)]

    def _add(self, part: Part, logprobs: Logprobs) -> bool:
        """Adds a part to the last item, or begins one with it. Returns whether an item was begun."""
        begins = self._begins_item(part)
        if begins:
            self._items.append(_OutputItem(part, []))
        self._items[-1].texts.append(part.arguments if isinstance(part, ToolCallDelta) else part.text)
        self._items[-1].logprobs += logprobs
        return begins

    def _part_events(self, part: Part, logprobs: Logprobs) -> bytes:
        """The events of a part. A part of another kind ends the open item and begins the next one."""
        ended = self._end_item() if self._begins_item(part) else b""
        events = ended + (self._begin_item(part) if self._add(part, logprobs) else b"")
        place = self._last_item_fields()
        if isinstance(part, ToolCallDelta):
            if not part.arguments:
                return events
            kind = "custom_tool_call_input" if part.is_custom else "function_call_arguments"
            return events + self._event(f"response.{kind}.delta", **place, delta=part.arguments)
        place["content_index"] = 0
        if isinstance(part, Reasoning):
            return events + self._event("response.reasoning_text.delta", **place, delta=part.text)
        return events + self._event("response.output_text.delta", **place, delta=part.text, logprobs=logprobs)

    def _begins_item(self, part: Part) -> bool:
        last = self._items[-1].first if self._items else None
        if isinstance(part, ToolCallDelta):
            return not (isinstance(last, ToolCallDelta) and last.index == part.index)
        return type(last) is not type(part)

    def _begin_item(self, part: Part) -> bytes:
        index = len(self._items) - 1
        item = self._item(index, part, "in_progress")
        if isinstance(part, ToolCallDelta):
            item["input" if part.is_custom else "arguments"] = ""
        else:
            item["content"] = []
        added = self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(part, ToolCallDelta):
            return added
        return added + self._event(
            "response.content_part.added",
            **self._last_item_fields(),
            content_index=0,
            part=_content(replace(part, text="")),
        )

    def _end_item(self, status: str = "completed") -> bytes:
        """The events at the end of the last item."""
        if not self._items:
            return b""
        part, place = self._items[-1].whole(), self._last_item_fields()
        if isinstance(part, ToolCallDelta) and part.is_custom:
            done = self._event("response.custom_tool_call_input.done", **place, input=part.arguments)
        elif isinstance(part, ToolCallDelta):
            done = self._event(
                "response.function_call_arguments.done",
                **place,
                name=self._namespaces.get(part.name, ("", part.name))[1],
                arguments=part.arguments,
            )
        else:
            place["content_index"] = 0
            if isinstance(part, Reasoning):
                done = self._event("response.reasoning_text.done", **place, text=part.text)
            else:
                logprobs = self._items[-1].logprobs
                done = self._event("response.output_text.done", **place, text=part.text, logprobs=logprobs)
            done += self._event("response.content_part.done", **place, part=_content(part, self._items[-1].logprobs))
        index = len(self._items) - 1
        item = self._item(index, part, status)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _last_item_fields(self) -> dict[str, Any]:
        """The fields of an event that identify the last item."""
        index = len(self._items) - 1
        return {"item_id": self._item_id(index), "output_index": index}

    def _item_id(self, index: int) -> str:
        match self._items[index].first:
            case ToolCallDelta(is_custom=is_custom):
                prefix = "ctc" if is_custom else "fc"
            case Reasoning():
                prefix = "rs"
            case _:
                prefix = "msg"
        return f"{prefix}_{self._head.id.removeprefix('resp_')}_{index}"

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        """Item number `index` of the output. `part`: its content."""
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        match part:
            case ToolCallDelta(_, arguments, name, call_id, is_custom):
                kind, field_name = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
                call = item | {"type": kind, "call_id": call_id, "name": name, field_name: arguments}
                if name in self._namespaces:
                    call["namespace"], call["name"] = self._namespaces[name]
                return call
            case Reasoning():
                return item | {
                    "type": "reasoning", "summary": [], "content": [_content(part)], "encrypted_content": None,
                }  # fmt: skip
            case _:
                logprobs = self._items[index].logprobs if status != "in_progress" else []
                return item | {"type": "message", "role": "assistant", "content": [_content(part, logprobs)]}

    def _finish(self) -> dict[str, Any]:
        """The complete response object."""
        response = self._response("incomplete" if self._was_cut else "completed")
        if self._was_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        parts = [item.whole() for item in self._items]
        statuses = ["completed"] * (len(parts) - 1) + ["incomplete" if self._was_cut else "completed"]
        response["output"] = [
            self._item(index, part, status) for index, (part, status) in enumerate(zip(parts, statuses, strict=False))
        ]
        response["usage"] = self._usage_fields()
        if self._head.shows_metrics:
            response["metrics"] = timing_metrics(self._final.timings, self._final.usage)
        self._on_end(response, parts)
        return response

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._final.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_device_tokens + usage.cached_host_tokens, "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._counter.count() if self._counter is not None else 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }  # fmt: skip

    def _response(self, status: str) -> dict[str, Any]:
        """The response object without output."""
        return {
            "id": self._head.id, "object": "response", "created_at": self._head.created, "completed_at": None,
            "status": status, "model": self._head.model, "error": None, "incomplete_details": None, "output": [],
            "usage": None, **self._settings,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._sequence, **fields}, separators=(",", ":"))
        self._sequence += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


def _content(part: Part, logprobs: Logprobs | None = None) -> dict[str, Any]:
    """The content part of an item. `part`: a text or reasoning."""
    assert not isinstance(part, ToolCallDelta)
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs or []}
