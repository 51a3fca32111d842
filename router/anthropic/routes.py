"""AnthropicRoutes: the HTTP endpoints of Anthropic's Messages API."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from coatcheck.router.anthropic.messages_answer import MessagesAnswer
from coatcheck.router.anthropic.messages_request import CountTokensRequest, MessagesRequest
from coatcheck.router.openai.chat_runner import ChatRunner
from coatcheck.router.openai.request_body import in_thread_if_long


class AnthropicRoutes:
    """Adds its endpoints to `app`."""

    def __init__(self, app: FastAPI, chats: ChatRunner) -> None:
        self._chats = chats
        app.add_api_route("/v1/messages", self.messages, methods=["POST"], response_model=None)
        app.add_api_route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"], response_model=None)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Generates the assistant's next message, in Anthropic's form."""
        chat = await in_thread_if_long(request, body.to_chat)
        head = self._chats.response_head(f"msg_{request.scope['request_id']}", body.model)
        return await self._chats.run(
            request, chat, lambda plan, _: MessagesAnswer(head.id, head.model, plan, self._chats.formatter)
        )

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> dict[str, Any]:
        """Counts the tokens of a message's prompt."""
        chat = await in_thread_if_long(request, body.to_chat)
        return {"input_tokens": await self._chats.count_tokens(request, chat)}
