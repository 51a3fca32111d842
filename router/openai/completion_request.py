"""CompletionRequest: the body of POST /v1/completions, and how it becomes GenerateRequests."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, TokenIds
from coatcheck.router.openai.sampling_fields import Count, CountOrAll, SamplingFields, TokenId

MAX_PROMPTS = 1024
Prompt = str | list[int]


def check_prompt_items(prompt: Any) -> Any:
    """Returns `prompt` unchanged. Raises ValueError for more than MAX_PROMPTS prompts, for a list that mixes kinds of
    items, and for items other than integers, texts, or lists of integers. The error names the first wrong item. true
    and 5.0 are not integers here."""
    if not isinstance(prompt, list) or not prompt:
        return prompt
    kind = type(prompt[0])
    if kind not in (int, str, list) or set(map(type, prompt)) != {kind}:  # not isinstance: a bool is an int
        is_known = kind in (int, str, list)
        index = next(n for n, item in enumerate(prompt) if type(item) is not kind) if is_known else 0
        raise _wrong_item(str(index), prompt[index])
    if kind is not int and len(prompt) > MAX_PROMPTS:
        raise ValueError(f"it has {len(prompt)} prompts; the maximum is {MAX_PROMPTS}")
    if kind is list:
        for outer, ids in enumerate(prompt):
            if not set(map(type, ids)) <= {int}:
                inner = next(n for n, item in enumerate(ids) if type(item) is not int)
                raise _wrong_item(f"{outer}.{inner}", ids[inner])
    return prompt


def _wrong_item(index: str, item: object) -> ValueError:
    if isinstance(item, list | dict):
        shown = "a list" if isinstance(item, list) else "an object"
    else:
        shown = json.dumps(item[:40] if isinstance(item, str) else item)[:40]
    return ValueError(
        f"item {index} is {shown}; send a text, a list of texts, a list of token ids (whole numbers), or a list of "
        "such lists, and do not mix them"
    )


def split_prompts(sent: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """The prompts that a client has sent, at least one; raises InvalidRequest."""
    if isinstance(sent, str):
        return [sent]
    if not sent:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if isinstance(sent[0], int):
        return [sent]  # all are integers (see check_prompt_items)
    return cast(list[Prompt], sent)


def _wider(*counts: int | None) -> int | None:
    """The largest of the counts that are set; -1 stands for all tokens."""
    given = [count for count in counts if count is not None]
    return -1 if -1 in given else max(given, default=None)


class CompletionRequest(SamplingFields):
    """`prompt` is a text or token ids, or a list of such prompts. The choices of prompt i have the indices i*n to
    i*n + n-1."""

    accepted_values: ClassVar = {"suffix": ("",), "add_special_tokens": (True,)}

    prompt: Annotated[
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)],
        BeforeValidator(check_prompt_items),
    ]
    max_tokens: Count = 16
    logprobs: CountOrAll | None = None
    echo: bool = False

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt is scored. Groups generate at least one token, which the response does not show."""
        return self.echo and self.max_tokens == 0

    def to_generate_requests(self, prompts: Sequence[Prompt], request_id: str) -> list[GenerateRequest]:
        """One for each of `prompts`; raises InvalidRequest."""
        echo_logprobs = self.logprobs if self.echo else None
        sampling = self.to_sampling_params(
            1 if self.scores_only else self.max_tokens,
            self.logprobs,
            _wider(echo_logprobs, self.prompt_logprobs),
            self.to_grammar(),
        )
        return [
            self.make_generate_request(
                request_id if len(prompts) == 1 else f"{request_id}-{index}",
                sampling,
                **({"text": prompt} if isinstance(prompt, str) else {"token_ids": TokenIds(ids=prompt)}),
            )
            for index, prompt in enumerate(prompts)
        ]
