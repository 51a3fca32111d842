"""ResponsesRoutes: the HTTP endpoints of OpenAI's Responses API."""

import uuid
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from coatcheck.proto.errors import InvalidParameter
from coatcheck.router.http.errors import error_response
from coatcheck.router.http.json_response import AsciiJsonResponse
from coatcheck.router.openai.chat_runner import ChatRunner
from coatcheck.router.openai.request_body import in_thread_if_long
from coatcheck.router.parsing.parts import Part
from coatcheck.router.responses.input_items import chat_of_items, chat_of_parts
from coatcheck.router.responses.response_store import ResponseStore, StoredResponse, measure_bytes
from coatcheck.router.responses.responses_answer import ResponsesAnswer
from coatcheck.router.responses.responses_request import ResponsesRequest

_OBJECT_BYTES: Final = 1024  # of a stored response beside its fields


class ResponsesRoutes:
    """Adds its endpoints to `app`."""

    def __init__(self, app: FastAPI, chats: ChatRunner) -> None:
        self._chats = chats
        self._store = ResponseStore()
        app.add_api_route("/v1/responses", self.create, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}", self.retrieve, methods=["GET"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}", self.delete, methods=["DELETE"], response_model=None)

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """Generates a response to input items, in the form of OpenAI's Responses API."""
        tenant: str = request.scope["tenant"].name
        before = self._previous(body, tenant)
        given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else chat_of_items(body.input)
        messages = [*(before.messages if before is not None else ()), *given]
        chat = await in_thread_if_long(request, lambda: body.to_chat(messages))
        head = self._chats.response_head(f"resp_{uuid.uuid4().hex}")  # not the request's id, which clients may choose

        def store(response: dict[str, Any], parts: Sequence[Part]) -> None:
            if body.store:
                added = [*given, *chat_of_parts(parts)]
                size = (before.size if before is not None else 0) + measure_bytes(added) + measure_bytes(response)
                whole = [*(before.messages if before is not None else ()), *added]
                self._store.add_response(StoredResponse(tenant, response, whole, size + _OBJECT_BYTES + 8 * len(whole)))

        return await self._chats.run(request, chat, lambda plan, _: ResponsesAnswer(head, body.settings(), plan, store))

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Returns a response that is still kept."""
        stored = self._store.find_response(response_id, request.scope["tenant"].name)
        return AsciiJsonResponse(stored.response) if stored is not None else _not_found(response_id)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Deletes a response that is still kept."""
        if not self._store.delete_response(response_id, request.scope["tenant"].name):
            return _not_found(response_id)
        return AsciiJsonResponse({"id": response_id, "object": "response", "deleted": True})

    def _previous(self, body: ResponsesRequest, tenant: str) -> StoredResponse | None:
        if body.previous_response_id is None:
            return None
        stored = self._store.find_response(body.previous_response_id, tenant)
        if stored is None:
            raise InvalidParameter(
                "previous_response_id",
                f"names {body.previous_response_id[:80]!r}, which this router does not keep; send the whole "
                "conversation as input",
            )
        return stored


def _not_found(response_id: str) -> Response:
    return error_response(404, f"this router keeps no response {response_id[:80]!r}; it may have been dropped since")
