"""EmbeddingRequest: the body of POST /v1/embeddings, and its response."""

import base64
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from coatcheck.proto.errors import InvalidParameter, InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import (
    POOLING_LAST,
    POOLING_MEAN,
    POOLING_UNSPECIFIED,
    Chat,
    EmbedRequest,
    EmbedResponse,
    TokenIds,
)
from coatcheck.router.event_loop.message_limits import MAX_MESSAGES
from coatcheck.router.openai.chat_request import Message, to_chat_proto
from coatcheck.router.openai.completion_request import MAX_PROMPTS, Prompt, check_prompt_items, split_prompts
from coatcheck.router.openai.sampling_fields import RequestBody, TokenId

PoolingName = Literal["last", "mean"]
_POOLING = {None: POOLING_UNSPECIFIED, "last": POOLING_LAST, "mean": POOLING_MEAN}


class PoolingFields(RequestBody):
    """The fields that all bodies of this folder have. `pooling`: see EmbedRequest in coatcheck.proto."""

    model: str = ""
    pooling: PoolingName | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str = ""

    def to_embed_requests(self, prompts: Sequence[Prompt | Chat], request_id: str, **fields: Any) -> list[EmbedRequest]:
        """One EmbedRequest for each of `prompts`. `fields`: further fields of each. Raises InvalidParameter."""
        return [
            EmbedRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                model=self.model,
                pooling=_POOLING[self.pooling],
                priority=self.priority,
                cache_salt=self.cache_salt,
                **_prompt_field(prompt),
                **fields,
            )
            for index, prompt in enumerate(prompts)
        ]

    @abstractmethod
    def kept_tokens(self, index: int) -> int | None:
        """How many tokens of prompt number `index` are kept. -1: as many as the context has. None: the prompt is not
        truncated, and a prompt that is longer than the context is refused."""

    @property
    @abstractmethod
    def keeps_last(self) -> bool:
        """Whether truncation keeps the last tokens of a prompt instead of the first."""

    @property
    def adds_special_tokens(self) -> bool:
        """Whether texts get the special tokens of the tokenizer."""
        return True

    def truncate(self, message: EmbedRequest, token_ids: Sequence[int], count: int, max_tokens: int) -> EmbedRequest:
        """Sets the prompt of `message` to the kept ones of `token_ids`. `count`: see `kept_tokens`. `max_tokens`: the
        tokens of the context."""
        count = max_tokens if count < 0 else min(count, max_tokens)
        message.token_ids.ids[:] = token_ids[-count:] if self.keeps_last else token_ids[:count]
        return message


class TruncationFields(PoolingFields):
    """vLLM's fields for truncation."""

    # Max tokens of each text; -1: as many as the model's context has.
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    truncation_side: Literal["left", "right"] = "right"  # where tokens are dropped

    def to_embed_requests(self, prompts: Sequence[Prompt | Chat], request_id: str, **fields: Any) -> list[EmbedRequest]:
        """See PoolingFields."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameter("truncate_prompt_tokens", "is 0; it must be -1 or at least 1")
        return super().to_embed_requests(prompts, request_id, **fields)

    def kept_tokens(self, index: int) -> int | None:
        """See PoolingFields."""
        return self.truncate_prompt_tokens

    @property
    def keeps_last(self) -> bool:
        """See PoolingFields."""
        return self.truncation_side == "left"


def _prompt_field(prompt: Prompt | Chat) -> dict[str, Any]:
    if isinstance(prompt, Chat):
        return {"chat": prompt}
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": TokenIds(ids=prompt)}


_Chat = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
_Chats = Annotated[list[_Chat], Field(fail_fast=True, max_length=MAX_PROMPTS, min_length=1)]


def _chats_or_chat(messages: Any) -> str:
    return "chats" if isinstance(messages, list) and messages and isinstance(messages[0], list) else "chat"


class EmbeddingRequest(TruncationFields):
    """`input`: a text or token ids, or a list of such inputs. `messages`: a chat, or a list of chats, in place of
    `input`. `messages`, the other fields of chats, and `normalize` are vLLM's and SGLang's."""

    accepted_values: ClassVar = {
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "padding": ("do_not_pad", False),
    }

    input: Annotated[
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
        | None,
        BeforeValidator(check_prompt_items),
    ] = None
    messages: (
        Annotated[Annotated[_Chat, Tag("chat")] | Annotated[_Chats, Tag("chats")], Discriminator(_chats_or_chat)] | None
    ) = None
    add_generation_prompt: bool = False
    add_special_tokens: bool | None = Field(
        None, description="Default true for texts. Chats have the special tokens of their template."
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    # vLLM's newer name comes second.
    normalize: Annotated[bool, Field(validation_alias=AliasChoices("normalize", "use_activation"))] = True

    @property
    def adds_special_tokens(self) -> bool:
        """See PoolingFields."""
        return self.add_special_tokens is not False

    def to_requests(self, request_id: str) -> list[EmbedRequest]:
        """One EmbedRequest for each input. Raises InvalidRequest."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("give either input or messages")
        if self.add_special_tokens and self.messages is not None:
            raise InvalidParameter("add_special_tokens", "is for texts: a chat template writes its own; remove it")
        prompts: Sequence[Prompt | Chat]
        if self.messages is not None:
            chats: Any = self.messages if _chats_or_chat(self.messages) == "chats" else [self.messages]
            prompts = [to_chat_proto(chat, [], self.chat_template_kwargs, self.add_generation_prompt) for chat in chats]
        else:
            prompts = split_prompts(self.input or "")
        if not all(map(bool, prompts)):
            raise InvalidRequest("an input is empty; give at least one token")
        fields = {"normalize": self.normalize} | ({"dimensions": self.dimensions} if self.dimensions else {})
        return self.to_embed_requests(prompts, request_id, **fields)


def embedding_response(
    response_id: str,
    model: str,
    created: int,
    encoding_format: Literal["float", "base64"],
    embedded: Sequence[EmbedResponse],
) -> dict[str, Any]:
    """OpenAI's list of embeddings, with vLLM's `id` and `created`. `encoding_format` "base64": see to_base64."""
    return {
        "id": response_id,
        "created": created,
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": list(one.embedding) if encoding_format == "float" else to_base64(one.embedding),
            }
            for index, one in enumerate(embedded)
        ],
        "model": model,
        "usage": usage_of(embedded),
    }


def usage_of(embedded: Sequence[EmbedResponse]) -> dict[str, Any]:
    """The `usage` of a response."""
    count = sum(one.prompt_tokens for one in embedded)
    cached = sum(one.cached_tokens for one in embedded)
    return {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}}


def to_base64(values: Sequence[float]) -> str:
    """The values as little-endian float32, in base64."""
    return base64.b64encode(array("f", values).tobytes()).decode()
