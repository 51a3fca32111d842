"""CompletionRequest: the body of POST /v1/completions, and the requests to the core that it stands for."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ...proto.coatcheck_pb2 import GenerateRequest, TokenIds
from ...proto.errors import InvalidRequest
from .fields import Count, SamplingFields, TokenId

MAX_PROMPTS = 1024
Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """A prompt is a text or token ids; a list of them is a batch, whose choices are numbered through."""

    neutral: ClassVar = {"suffix": ("",), "add_special_tokens": (True,)}

    prompt: (
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: Count = 16
    logprobs: Count | None = None
    echo: bool = False
    best_of: Annotated[Count | None, Field(description="Only n itself: choices are not ranked here.")] = None

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated: the core generates one token, which nobody sees."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[Prompt]:
        """One or more; raises InvalidRequest."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token")
        ids = [entry for entry in prompt if isinstance(entry, int)]
        if ids:  # then all of them are
            return [ids]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} at once")
        return [entry for entry in prompt if not isinstance(entry, int)]

    def messages(self, prompts: Sequence[Prompt], request_id: str) -> list[GenerateRequest]:
        """One per prompt; raises InvalidRequest."""
        if self.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of is {self.best_of}; choices are not ranked here: leave it out, or set it to n"
            )
        wanted = self.logprobs if self.echo else None
        sampling = self.sampling(
            1 if self.scores_only else self.max_tokens,
            self.logprobs,
            self.prompt_logprobs if wanted is None else max(wanted, self.prompt_logprobs or 0),
            self.grammar(),
        )
        return [
            GenerateRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                model=self.model,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else TokenIds(ids=prompt),
                sampling=sampling,
                cache_salt=self.cache_salt,
                priority=self.priority,
                session_id=self.session_id,
            )
            for index, prompt in enumerate(prompts)
        ]
