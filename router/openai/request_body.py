"""BodyRoute: an endpoint whose JSON body is parsed and validated here; a side process does so with a long body.

Parsing JSON is one call of C code that holds the GIL, 0.1 s for a million numbers, and validating it takes up to 20
microseconds per object. So the bytes of a long body go to a side process, which returns the validated model.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.errors import LONE_SURROGATE, InvalidBody
from coatcheck.router.openai.sampling_fields import ACCEPTED_VALUES, UNIMPLEMENTED_FIELDS, RequestBody

# Parsing and validating a body below all three limits takes at most 20 ms.
_SHORT_BYTES: Final = 256 << 10
_SHORT_OBJECTS: Final = 1024
_SHORT_VALUES: Final = 8192
# Max depth of nested lists and objects. Python's own limit is about 900 when it parses here, but lower when the values
# are encoded again.
_MAX_DEPTH: Final = 256
# Limit on the values of a body outside of _PROMPT_FIELDS: messages, tools and schemas. Each is visited several times.
_MAX_VALUES: Final = 1 << 17
_PROMPT_FIELDS: Final = frozenset({"prompt", "tokens"})
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of a surrogate, lone or in a pair

_TOO_DEEP: Final = "the body is nested too deeply; send fewer lists and objects within one another"
_NO_OBJECT: Final = "the body must be a JSON object, sent with content-type application/json"
# Why a parameter is not supported, and what to send instead, for parameters that clients of other servers often send.
_REASONS: Final = {
    **dict.fromkeys(
        ("use_beam_search", "length_penalty", "early_stopping"),
        "there is no beam search: ask for n choices with logprobs, and rank them",
    ),
    "kv_transfer_params": "a group computes prompt and answer itself, and takes no KV from elsewhere",
    "background": "only the router's memory would hold the response until it is read: wait for it, or stream it",
}

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=RequestBody)
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def body_route(side: SideProcesses) -> type[APIRoute]:
    """A route class whose long bodies are read in the processes of `side`."""

    class BodyRoute(APIRoute):
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
                if not body or not _is_json(request.headers):
                    raise InvalidBody(_NO_OBJECT)
                is_long = _is_long(body)
                if is_long:
                    model = await side.run(validate_body, kind, body, is_long=True)
                else:
                    model = validate_body(kind, body, is_long=False)
                return await handle(_ValidatedRequest(request, model, is_long=is_long))

            return handle_request

    return BodyRoute


class _ValidatedRequest(Request):
    """A request whose body is validated already: `json` returns the model, which pydantic accepts unchanged."""

    def __init__(self, request: Request, model: RequestBody, *, is_long: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self.is_long = is_long

    async def body(self) -> bytes:
        return b"{}"  # FastAPI checks only whether the body is empty; a long body is not kept

    async def json(self) -> Any:
        return self._model


async def in_thread_if_long(request: Request, make: Callable[[], _T]) -> _T:
    """Returns make(); a thread calls it if the request's body is long."""
    is_long = isinstance(request, _ValidatedRequest) and request.is_long
    return await asyncio.to_thread(make) if is_long else make()


def validate_body(kind: type[RequestBody], body: bytes, *, is_long: bool) -> RequestBody:
    """Parses and validates a JSON body. Raises InvalidBody, or InvalidRequest for a body of too many values. Lone
    surrogates in a short body raise UnicodeEncodeError only when its GenerateRequest is made."""
    not_finite: list[str] = []

    def read_float(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            not_finite.append(text)
        return number

    try:
        value = json.loads(body, parse_constant=read_float, parse_float=read_float)
    except json.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise InvalidBody("the body is not UTF-8; encode its texts as UTF-8, or escape them") from None
    except RecursionError:
        raise InvalidBody(_TOO_DEEP) from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise InvalidBody("a number of the body has too many digits; send a smaller one") from None
    # Strings may have brackets too, so that this count only tells whether the depth must be found out.
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and sum(1 for _ in _levels(value)) > _MAX_DEPTH + 1:
        raise InvalidBody(_TOO_DEEP)
    if is_long and isinstance(value, dict):
        _check_values({name: part for name, part in value.items() if name not in _PROMPT_FIELDS})
    try:
        if is_long and _SURROGATE_ESCAPE.search(body):
            _check_texts(value)
        model = validate_fields(kind, value)
    except UnicodeEncodeError:
        raise InvalidRequest(LONE_SURROGATE) from None
    if not_finite:  # in an object of any form, such as a schema: the errors of other fields name the field
        raise InvalidBody(f"the body has the number {not_finite[0][:80]}; send finite numbers")
    return model


def validate_fields(kind: type[_Body], value: object) -> _Body:
    """Validates a parsed JSON value as a body of type `kind`. Raises InvalidBody."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error, kind, value) from None


def _explain(error: ValidationError, kind: type[RequestBody], value: object) -> InvalidBody:
    errors = error.errors(include_url=False, include_input=False)
    # Of a union's branches, the one with the deepest error is most likely the one that the client meant.
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    if first["type"] == "model_type" and not first["loc"]:
        return InvalidBody(_NO_OBJECT)
    field = _field_path(first["loc"], value, is_missing=first["type"] == "missing") or "body"
    match first["type"]:
        case "union_tag_invalid":
            context = first["ctx"]
            field += ".type"
            message = f"{field} is {context['tag'][:80]!r}; it must be one of {context['expected_tags']}"
        case "union_tag_not_found":
            field += ".type"
            message = f"{field} is missing"
        case "extra_forbidden":
            message = _explain_extra_field(field, kind)
        case "missing":
            message = f"{field} is missing"
        case "literal_error" if isinstance(sent := _value_at(value, first["loc"]), str):
            message = f"{field} is {sent[:80]!r}; it should be {first['ctx']['expected']}"
        case "model_type" | "model_attributes_type":
            message = f"{field}: it should be an object"
        case _:
            reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            message = f"{field}: {reason}"
    return InvalidBody(message, field)


def _field_path(loc: Sequence[int | str], value: object, *, is_missing: bool) -> str:
    """The path of a field in the body `value`, from pydantic's `loc`. The parts of `loc` that name branches of unions
    are left out, because they mean nothing to a client. `is_missing`: the body lacks the last part, or has null
    there."""
    path: list[str] = []
    for part in loc[:-1] if is_missing else loc:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]  # type: ignore[index]  # one of the two
            path.append(str(part))
    return ".".join([*path, str(loc[-1])] if is_missing else path)


def _value_at(value: object, loc: Sequence[int | str]) -> object:
    """The value of a field in the body `value`; see _field_path."""
    for part in loc:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]  # type: ignore[index]  # one of the two
    return value


def _explain_extra_field(field: str, kind: type[RequestBody]) -> str:
    """`field`: the path of the field in the body."""
    name = field.rpartition(".")[2]
    if name in UNIMPLEMENTED_FIELDS | ACCEPTED_VALUES.keys() | kind.accepted_values.keys():
        reason = _REASONS.get(name)
        return f"Unsupported parameter {field!r}{f' ({reason})' if reason else ''}; remove it"
    return f"Unknown parameter {field!r}; remove it"


def _is_long(body: bytes) -> bool:
    """Whether parsing and validating the body could block the event loop for more than 20 ms."""
    return (
        len(body) > _SHORT_BYTES
        or body.count(b"{") + body.count(b"[") > _SHORT_OBJECTS
        or body.count(b",") > _SHORT_VALUES
    )


def _is_json(headers: Mapping[str, str]) -> bool:
    """Whether the content type is application/json or application/...+json: what FastAPI passes to `json`."""
    kind, _, subtype = headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and "/" not in subtype and (subtype == "json" or subtype.endswith("+json"))


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
