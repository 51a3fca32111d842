"""LongBodyRoute: an endpoint whose long bodies are read in a side process.

Parsing JSON is one call of C code that holds the GIL, 0.1 s for a million numbers, and validating it takes up to 20
microseconds per object. FastAPI reads a short body on the event loop. The bytes of a long body go to a side process,
which returns the validated model.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.errors import LONE_SURROGATE, InvalidBody, explain_validation
from coatcheck.router.openai.sampling_fields import RequestBody

# Parsing and validating a body below all three limits takes at most 20 ms.
_SHORT_BYTES: Final = 256 << 10
_SHORT_OBJECTS: Final = 1024
_SHORT_VALUES: Final = 8192
# Limit on the values of a body outside of _PROMPT_FIELDS: messages, tools and schemas. Each is visited several times.
_MAX_VALUES: Final = 1 << 17
_PROMPT_FIELDS: Final = frozenset({"prompt", "tokens"})
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of a surrogate, alone or in a pair

_T = TypeVar("_T")
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def is_long(body: bytes) -> bool:
    """Whether parsing and validating the body could block the event loop for more than 20 ms."""
    return (
        len(body) > _SHORT_BYTES
        or body.count(b"{") + body.count(b"[") > _SHORT_OBJECTS
        or body.count(b",") > _SHORT_VALUES
    )


def validate_body(kind: type[RequestBody], body: bytes) -> RequestBody:
    """Parses and validates a JSON body.

    Raises InvalidRequest for a body of too many values. Other errors, InvalidRequest or InvalidBody, have the same
    message as FastAPI's error for a short body.
    """
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # not UTF-8, a number of a million digits, or deep nesting
        raise InvalidRequest("There was an error parsing the body") from None
    if isinstance(value, dict):
        _check_values({name: part for name, part in value.items() if name not in _PROMPT_FIELDS})
    try:
        if _SURROGATE_ESCAPE.search(body):
            _check_texts(value)
        model = kind.model_validate(value)
        model.check_lengths()
        return model
    except UnicodeEncodeError:
        raise InvalidRequest(LONE_SURROGATE) from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True, include_input=False)
        raise InvalidBody(
            *explain_validation([{**error, "loc": ("body", *error["loc"])} for error in errors])
        ) from None


def long_body_route(side: SideProcesses) -> type[APIRoute]:
    """A route class whose long bodies are read in the processes of `side`."""

    class LongBodyRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            kind: type[RequestBody] = self.body_field.field_info.annotation  # type: ignore[assignment]

            async def handle_request(request: Request) -> Response:
                try:
                    body = await request.body()
                except ClientDisconnect as error:  # a second call of `body` would never return
                    raise HTTPException(400, "There was an error parsing the body") from error
                if _is_json(request.headers) and is_long(body):
                    model = await side.run(validate_body, kind, body)
                    request = _ValidatedRequest(request, model)
                return await handle(request)

            return handle_request

    return LongBodyRoute


async def in_thread_if_long(request: Request, make: Callable[[], _T]) -> _T:
    """Returns make(); a thread calls it if the request's body is long."""
    return await asyncio.to_thread(make) if isinstance(request, _ValidatedRequest) else make()


class _ValidatedRequest(Request):
    """A request whose body is validated already: `json` returns the model, which pydantic accepts unchanged."""

    def __init__(self, request: Request, model: RequestBody) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        return b"{}"  # FastAPI checks only whether the body is empty; the long body is not kept

    async def json(self) -> Any:
        return self._model


def _is_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))


def _check_values(value: object) -> None:
    """Raises InvalidRequest for more than _MAX_VALUES values at all depths together."""
    left = _MAX_VALUES
    for level in _levels(value):
        left -= len(level)
        if left < 0:
            raise InvalidRequest(f"the body has more than {_MAX_VALUES} values beside its prompt; send fewer")


def _check_texts(value: object) -> None:
    """Raises UnicodeEncodeError for a lone surrogate. On the event loop finding it would take most of a second."""
    for level in _levels(value):
        for one in level:
            for text in one if isinstance(one, dict) else (one,):
                if isinstance(text, str):
                    text.encode()


def _levels(value: object) -> Iterator[list[Any]]:
    """[value], then the list of the values one level deeper, and so on."""
    level: list[Any] = [value]
    while level:
        yield level
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts]
