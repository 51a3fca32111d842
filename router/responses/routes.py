"""ResponsesRoutes: the HTTP endpoints of OpenAI's Responses API."""

import re
import uuid
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from coatcheck.proto.errors import InvalidParameter
from coatcheck.router.http.errors import error_response, report_refusal
from coatcheck.router.http.json_response import AsciiJsonResponse
from coatcheck.router.openai.chat_runner import ChatRunner
from coatcheck.router.openai.request_body import in_thread_if_long
from coatcheck.router.openai.response_parts import count_fields
from coatcheck.router.openai.response_sender import LargeResponses
from coatcheck.router.parsing.parts import Part
from coatcheck.router.responses.input_items import (
    InputItem,
    ItemReference,
    MessageItem,
    chat_of_items,
    chat_of_parts,
    item_of,
    listed_items,
)
from coatcheck.router.responses.response_store import ResponseStore, StoredResponse, measure_bytes
from coatcheck.router.responses.responses_answer import ResponsesAnswer
from coatcheck.router.responses.responses_request import ResponsesRequest

_MAX_LISTED: Final = 100  # input items on a page
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,2}")
_OBJECT_BYTES: Final = 1024  # memory that a stored response takes beside its fields
_ITEM_ID: Final = re.compile(r"[a-z]{2,3}_(?P<response>[0-9a-f]{32})_(?P<index>[0-9]{1,6})")  # see ResponsesAnswer
# Max log-probabilities of a response. The event loop encodes it, and this many take 0.1 s.
_MAX_LOGPROBS: Final = 1 << 15


class ResponsesRoutes:
    """Adds its endpoints to `app`. `chats` runs chats, and `large` encodes what is kept."""

    def __init__(self, app: FastAPI, chats: ChatRunner, large: LargeResponses) -> None:
        self._chats = chats
        self._large = large
        self._store = ResponseStore()
        app.add_api_route("/v1/responses", self.create, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses/input_tokens", self.count_tokens, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}", self.retrieve, methods=["GET"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}", self.delete, methods=["DELETE"], response_model=None)
        path = "/v1/responses/{response_id}/input_items"
        app.add_api_route(path, self.input_items, methods=["GET"], response_model=None)

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """Generates a response to input items, in the form of OpenAI's Responses API."""
        tenant: str = request.scope["tenant"].name
        before = self._find_previous(body, tenant)
        items = self._input_items(body, tenant)
        given = chat_of_items(items)
        messages = [*(before.messages if before is not None else ()), *given]
        chat = await in_thread_if_long(request, lambda: body.to_chat(messages))
        if body.has_logprobs:
            self._check_logprobs(body)
        # The id is not the request's, which clients may choose.
        head = self._chats.response_head(f"resp_{uuid.uuid4().hex}", body.model)
        listed, input_size = [], 0
        if body.store:
            listed = await in_thread_if_long(request, lambda: listed_items(items, head.id))
            input_size = await in_thread_if_long(request, lambda: measure_bytes(given) + measure_bytes(listed))

        def store(response: dict[str, Any], parts: Sequence[Part]) -> None:
            if body.store:
                added = chat_of_parts(parts)
                whole = [*messages, *added]
                size = (before.size if before is not None else 0) + input_size
                size += measure_bytes(added) + measure_bytes(response) + _OBJECT_BYTES + 8 * len(whole)
                self._store.add_response(StoredResponse(tenant, response, whole, size, listed))

        return await self._chats.run(
            request,
            chat,
            lambda plan, _: ResponsesAnswer(
                head,
                body.settings(),
                plan,
                store,
                self._chats.formatter,
                namespaces=body.namespaces,
                has_logprobs=body.has_logprobs,
            ),
        )

    async def count_tokens(self, request: Request, body: ResponsesRequest) -> dict[str, Any]:
        """Counts the tokens of a response's prompt."""
        tenant: str = request.scope["tenant"].name
        before = self._find_previous(body, tenant)
        given = chat_of_items(self._input_items(body, tenant))
        messages = [*(before.messages if before is not None else ()), *given]
        chat = await in_thread_if_long(request, lambda: body.to_chat(messages))
        return {"object": "response.input_tokens", "input_tokens": await self._chats.count_tokens(request, chat)}

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Returns a response that is still kept."""
        stored = self._store.find_response(response_id, request.scope["tenant"].name)
        if stored is None:
            return _not_found(response_id)
        return await self._large.make_json(count_fields(stored.response), dict, stored.response)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Deletes a response that is still kept."""
        if not self._store.delete_response(response_id, request.scope["tenant"].name):
            return _not_found(response_id)
        return AsciiJsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request, response_id: str) -> Response:
        """Lists the input items of a response that is still kept. Query parameters: `limit`, the most items on a page;
        `order`, "asc" or "desc"; `after`, the id of the item before the page."""
        limit, order, after = (
            request.query_params.get(name, usual) for name, usual in (("limit", "20"), ("order", "desc"), ("after", ""))
        )
        if _LIMIT.fullmatch(limit) is None or int(limit) > _MAX_LISTED:
            raise InvalidParameter("limit", f"is {limit[:20]!r}; it must be from 1 to {_MAX_LISTED}")
        if order not in ("asc", "desc"):
            raise InvalidParameter("order", f"is {order[:20]!r}; it must be asc or desc")
        stored = self._store.find_response(response_id, request.scope["tenant"].name)
        if stored is None:
            return _not_found(response_id)
        items = list(stored.input_items if order == "asc" else reversed(stored.input_items))
        start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
        if after and not start:
            raise InvalidParameter("after", f"is {after[:80]!r}, which is no input item of this response")
        shown = items[start : start + int(limit)]
        page = {
            "object": "list", "data": shown, "has_more": start + len(shown) < len(items),
            "first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None,
        }  # fmt: skip
        return await self._large.make_json(count_fields(page), dict, page)

    def _input_items(self, body: ResponsesRequest, tenant: str) -> list[InputItem]:
        """The items of the body's input. Raises InvalidParameter for a reference to an item that is not kept, and for
        two references to one item: with many, a short body could make a prompt of gigabytes."""
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        references = [item.id for item in body.input if isinstance(item, ItemReference)]
        if len(set(references)) < len(references):
            raise InvalidParameter("input", "refers to an item more than once; send the further copies themselves")
        return [self._find_item(item.id, tenant) if isinstance(item, ItemReference) else item for item in body.input]

    def _find_item(self, item_id: str, tenant: str) -> InputItem:
        """The item of a response's output with this id."""
        if (found := _ITEM_ID.fullmatch(item_id)) is not None:
            stored = self._store.find_response(f"resp_{found['response']}", tenant)
            output = stored.response["output"] if stored is not None else []
            index = int(found["index"])
            if index < len(output) and output[index]["id"] == item_id:
                return item_of(output[index])
        raise InvalidParameter(
            "input", f"refers to the item {item_id[:80]!r}, which this router does not keep; send the item itself"
        )

    def _check_logprobs(self, body: ResponsesRequest) -> None:
        """Raises InvalidParameter if the response could have more log-probabilities than are encoded at once."""
        count = body.top_logprobs + 1
        most = _MAX_LOGPROBS // count
        if min(body.max_output_tokens or self._chats.max_model_len, self._chats.max_model_len) > most:
            raise InvalidParameter(
                "max_output_tokens", f"must be at most {most} for a response with {count} log-probabilities a token"
            )

    def _find_previous(self, body: ResponsesRequest, tenant: str) -> StoredResponse | None:
        """The response that the body continues; None if it begins a chat. Raises InvalidParameter if it is not kept."""
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
    return error_response(
        report_refusal(404, f"this router keeps no response {response_id[:80]!r}; it may have been dropped since")
    )
