"""The bodies of POST /tokenize and POST /detokenize, in vLLM's form."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, DetokenizeRequest, TokenizeRequest, TokenizeResponse
from coatcheck.router.event_loop.message_limits import MAX_MESSAGES, MAX_TOOLS
from coatcheck.router.openai.chat_request import Message, to_chat_proto
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.sampling_fields import RequestBody, TokenId
from coatcheck.router.openai.tools import AnyTool
from coatcheck.router.text.chat_template import special_tokens_of
from coatcheck.router.text.tokenizer import TokenizerJson


class TokenizeBody(RequestBody):
    """Either `prompt` or `messages`."""

    accepted_values: ClassVar = {"continue_final_message": (False,)}

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def to_proto(self) -> TokenizeRequest:
        """Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages")
        chat: Chat | None = None
        if self.messages is not None:
            chat = to_chat_proto(self.messages, self.tools, self.chat_template_kwargs, self.add_generation_prompt)
        special = self.add_special_tokens
        if chat is not None and special is False:
            special = None  # a chat template has its own special tokens
        return TokenizeRequest(model=self.model, text=self.prompt, chat=chat, add_special_tokens=special)


class DetokenizeBody(RequestBody):
    model: str = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False

    def to_proto(self) -> DetokenizeRequest:
        return DetokenizeRequest(model=self.model, token_ids=self.tokens, skip_special_tokens=self.skip_special_tokens)


def tokenize_response(
    found: TokenizeResponse, max_model_len: int | None, formatter: LogprobsFormatter | None
) -> dict[str, Any]:
    """The response of /tokenize; with `formatter` it includes each token's text."""
    made: dict[str, Any] = {
        "count": len(found.token_ids),
        "max_model_len": max_model_len,
        "tokens": list(found.token_ids),
        "token_strs": None,
    }
    if formatter is not None:
        made["token_strs"] = [formatter.token_text(token_id) for token_id in found.token_ids]
    return made


def tokenizer_info(tokenizer: TokenizerJson) -> dict[str, Any]:
    """The response of /tokenizer_info: the tokenizer's configuration, with its special tokens as texts, and the chat
    template."""
    settings = tokenizer.settings
    template = tokenizer.template.source if tokenizer.template is not None else None
    tokens = {"bos_token": None, "eos_token": None, "pad_token": None, **special_tokens_of(settings)}
    return {"tokenizer_class": None, **settings, **tokens, "chat_template": template}
