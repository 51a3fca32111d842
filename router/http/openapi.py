"""ApiApp: a FastAPI application whose /openapi.json says what the endpoints return.

The endpoints write their responses themselves, so FastAPI knows no schema of them. It would call every response a
string, and every refusal a 422, which this server never sends.
"""

from typing import Any, Final

from fastapi import FastAPI

from coatcheck.router.http.errors import ANTHROPIC_PATH

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number"}
_OBJECT: Final[Schema] = {"type": "object"}
_OPTIONAL_TEXT: Final[Schema] = {"type": ["string", "null"]}
_OPTIONAL_COUNT: Final[Schema] = {"type": ["integer", "null"]}
_OPTIONAL_OBJECT: Final[Schema] = {"type": ["object", "null"]}


def _one_of(*values: str | None) -> Schema:
    return {"enum": list(values)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(**fields: Schema) -> Schema:
    """An object that has all of `fields`, and may have others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


_USAGE: Final = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_GENERATED_USAGE: Final = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CALL: Final = _object(id=TEXT, type=_one_of("function"), function=_object(name=TEXT, arguments=TEXT))
_MESSAGE: Final = _object(role=_one_of("assistant"), content=_OPTIONAL_TEXT, reasoning_content=_OPTIONAL_TEXT)
_MESSAGE["properties"]["tool_calls"] = _list(_CALL)
_HEAD: Final[dict[str, Schema]] = {"id": TEXT, "created": _INTEGER, "model": TEXT}
_MODEL: Final = _object(
    id=TEXT, object=_one_of("model"), created=_INTEGER, owned_by=TEXT, root=TEXT, max_model_len=_OPTIONAL_COUNT
)
_RESPONSE: Final = _object(
    id=TEXT,
    object=_one_of("response"),
    created_at=_INTEGER,
    model=TEXT,
    status=_one_of("completed", "incomplete", "failed", "in_progress"),
    output=_list(_object(type=_one_of("message", "reasoning", "function_call"), id=TEXT)),
    error=_OPTIONAL_OBJECT,
    incomplete_details=_OPTIONAL_OBJECT,
)
_STATE: Final = _object(status=TEXT)
_RANKED: Final = _object(index=_COUNT, relevance_score=_NUMBER)
_OPENAI_ERROR: Final = _object(error=_object(message=TEXT, type=TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT))
_ANTHROPIC_ERROR: Final = _object(type=_one_of("error"), error=_object(type=TEXT, message=TEXT))

# The JSON of a response with status 200, by method and path.
_RESPONSES: Final[dict[tuple[str, str], Schema]] = {
    ("post", "/v1/completions"): _object(
        **_HEAD,
        object=_one_of("text_completion"),
        choices=_list(
            _object(index=_COUNT, text=TEXT, logprobs=_OPTIONAL_OBJECT, finish_reason=_one_of("stop", "length"))
        ),
        usage=_GENERATED_USAGE,
    ),
    ("post", "/v1/chat/completions"): _object(
        **_HEAD,
        object=_one_of("chat.completion"),
        choices=_list(
            _object(
                index=_COUNT,
                message=_MESSAGE,
                logprobs=_OPTIONAL_OBJECT,
                finish_reason=_one_of("stop", "length", "tool_calls"),
            )
        ),
        usage=_GENERATED_USAGE,
    ),
    ("get", "/v1/models"): _object(object=_one_of("list"), data=_list(_MODEL)),
    ("get", "/v1/models/{name}"): _MODEL,
    ("post", "/tokenize"): _object(count=_COUNT, max_model_len=_OPTIONAL_COUNT, tokens=_list(_COUNT)),
    ("post", "/detokenize"): _object(prompt=TEXT),
    ("get", "/tokenizer_info"): _object(tokenizer_class=TEXT),
    ("get", "/version"): _object(version=TEXT),
    ("get", "/load"): _object(server_load=_COUNT),
    ("post", "/reset_prefix_cache"): _object(groups=_list(TEXT)),
    ("get", "/health"): _STATE,
    ("get", "/ping"): _STATE,
    ("post", "/v1/messages"): _object(
        id=TEXT,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=TEXT,
        content=_list(_object(type=_one_of("text", "thinking", "tool_use"))),
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_OPTIONAL_TEXT,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    ("post", "/v1/messages/count_tokens"): _object(input_tokens=_COUNT),
    ("post", "/v1/responses"): _RESPONSE,
    ("get", "/v1/responses/{response_id}"): _RESPONSE,
    ("delete", "/v1/responses/{response_id}"): _object(id=TEXT, object=_one_of("response"), deleted={"const": True}),
    ("get", "/v1/responses/{response_id}/input_items"): _object(
        object=_one_of("list"),
        data=_list(_object(id=TEXT, type=TEXT)),
        has_more={"type": "boolean"},
        first_id=_OPTIONAL_TEXT,
        last_id=_OPTIONAL_TEXT,
    ),
    ("post", "/v1/responses/input_tokens"): _object(object=_one_of("response.input_tokens"), input_tokens=_COUNT),
    ("post", "/v1/embeddings"): _object(
        object=_one_of("list"),
        model=TEXT,
        data=_list(
            _object(
                object=_one_of("embedding"),
                index=_COUNT,
                embedding={"anyOf": [_list(_NUMBER), {"type": "string", "contentEncoding": "base64"}]},
            )
        ),
        usage=_USAGE,
    ),
    ("post", "/v2/embed"): _object(
        id=TEXT,
        embeddings=_OBJECT,
        texts=_list(TEXT),
        meta=_object(billed_units=_object(input_tokens=_COUNT)),
        response_type=_one_of("embeddings_by_type"),
    ),
    ("post", "/v1/score"): _object(
        **_HEAD,
        object=_one_of("list"),
        data=_list(_object(index=_COUNT, object=_one_of("score"), score=_NUMBER)),
        usage=_USAGE,
    ),
    ("post", "/rerank"): _object(id=TEXT, model=TEXT, results=_list(_RANKED), usage=_USAGE),
}
_PLAIN_TEXT: Final = frozenset({("get", "/metrics")})
_PROBES: Final = frozenset({"/health", "/ping"})
_STREAMS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})


class ApiApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's description of the requests, with the responses of `_RESPONSES`, and any other status as an error
        in the form of the API that the path belongs to."""
        if self.openapi_schema is None:
            made = super().openapi()
            for path, operations in made["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = _responses(method, path)
            for name in ("HTTPValidationError", "ValidationError"):
                made.get("components", {}).get("schemas", {}).pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _responses(method: str, path: str) -> dict[str, Any]:
    if (method, path) in _PLAIN_TEXT:
        content: dict[str, Any] = {"text/plain": {"schema": TEXT}}
    else:
        content = {"application/json": {"schema": _RESPONSES.get((method, path), _OBJECT)}}
    if path in _STREAMS:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no schema of a stream
    made = {"200": {"description": "Successful response", "content": content}}
    if path in _PROBES:
        made["503"] = {"description": "New requests would be refused", "content": content}
    error = _ANTHROPIC_ERROR if path.startswith(ANTHROPIC_PATH) else _OPENAI_ERROR
    made["default"] = {"description": "Error", "content": {"application/json": {"schema": error}}}
    return made
