"""LongBodyRoute: an endpoint whose long bodies are read in a side process.

Reading JSON is one call of C code that holds the GIL, 0.1 s for a million numbers, and validating it
takes up to 20 microseconds per object. FastAPI reads a short body on the event loop. A long one goes to a side process
as it came, and comes back as the validated model.
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

from ...proto.errors import InvalidRequest
from ..side_process import SideProcesses
from .error_body import HALF_CHARACTER, MisreadBody, explain
from .fields import Body

# Reading and validating a body within these takes at most 20 ms.
_SHORT_BYTES: Final = 256 << 10
_SHORT_OBJECTS: Final = 1024
_SHORT_VALUES: Final = 8192
# Values beside the prompts of a completion: messages, tools and schemas. Each is looked at several times on its way.
_MOST_VALUES: Final = 1 << 17
_NUMBERS: Final = frozenset({"prompt", "tokens"})
_HALF_CHARACTER: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of a surrogate, alone or in a pair

_Made = TypeVar("_Made")
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def is_long(body: bytes) -> bool:
    """Whether reading it would stop the event loop for more than 20 ms."""
    return (
        len(body) > _SHORT_BYTES
        or body.count(b"{") + body.count(b"[") > _SHORT_OBJECTS
        or body.count(b",") > _SHORT_VALUES
    )


def read_body(kind: type[Body], body: bytes) -> Body:
    """The model that a body of JSON stands for.

    Raises InvalidRequest for a body of too many values. Other errors, InvalidRequest or MisreadBody, say what a client
    hears of the same error in a short body, which FastAPI reads.
    """
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise MisreadBody(f"the body is not JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # bytes that are no text, a number of a million digits, deep nesting
        raise InvalidRequest("There was an error parsing the body") from None
    if isinstance(value, dict):
        _check_values({name: part for name, part in value.items() if name not in _NUMBERS})
    try:
        if _HALF_CHARACTER.search(body):
            _check_texts(value)
        model = kind.model_validate(value)
        model.check_lengths()
        return model
    except UnicodeEncodeError:
        raise InvalidRequest(HALF_CHARACTER) from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True, include_input=False)
        raise MisreadBody(*explain([{**one, "loc": ("body", *one["loc"])} for one in errors])) from None


def long_body_route(side: SideProcesses) -> type[APIRoute]:
    """The class of routes whose long bodies are read by these processes."""

    class LongBodyRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            kind: type[Body] = self.body_field.field_info.annotation  # type: ignore[assignment]

            async def handle_any(request: Request) -> Response:
                try:
                    body = await request.body()
                except ClientDisconnect as error:  # the client is gone; a second call of `body` would never return
                    raise HTTPException(400, "There was an error parsing the body") from error
                if _is_json(request.headers) and is_long(body):
                    model = await side.run(read_body, kind, body)
                    request = _ReadRequest(request, model)
                return await handle(request)

            return handle_any

    return LongBodyRoute


async def made_aside(request: Request, make: Callable[[], _Made]) -> _Made:
    """Returns what `make` makes of the body; in a thread if the body is long."""
    return await asyncio.to_thread(make) if isinstance(request, _ReadRequest) else make()


class _ReadRequest(Request):
    """A request whose body is validated already: FastAPI gets the model, and pydantic takes it as it is."""

    def __init__(self, request: Request, model: Body) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        return b"{}"  # the long one is not kept

    async def json(self) -> Any:
        return self._model


def _is_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))


def _check_values(value: object) -> None:
    """Raises InvalidRequest for more than _MOST_VALUES of them, however deep."""
    left = _MOST_VALUES
    for level in _levels(value):
        left -= len(level)
        if left < 0:
            raise InvalidRequest(f"the body has more than {_MOST_VALUES} values beside its prompt; send fewer")


def _check_texts(value: object) -> None:
    """Raises UnicodeEncodeError for half of a surrogate pair. To find it later costs the router most of a second."""
    for level in _levels(value):
        for one in level:
            for text in one if isinstance(one, dict) else (one,):
                if isinstance(text, str):
                    text.encode()


def _levels(value: object) -> Iterator[list[Any]]:
    """The values within a value, itself included, by how deep they are."""
    level: list[Any] = [value]
    while level:
        yield level
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts]
