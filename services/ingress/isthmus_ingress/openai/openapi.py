"""The HTTP door's description in OpenAPI 3.1, from the models that read requests: served at ``/openapi.json``, and
written to ``schemas/openapi.json``."""

from __future__ import annotations

from typing import Any

import isthmus_shared
from isthmus_ingress.openai.schema import (
    HARMLESS,
    MAX_PROMPTS,
    MAX_TOKEN_ID,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
)

JSON, EVENTS = "application/json", "text/event-stream"
MAX_TOKENIZE = 1_000_000
"""Token ids that /detokenize takes."""
ERRORS = {
    "400": "The request is wrong; `param` says where",
    "401": "No key, or none of this server's",
    "404": "No such model or path",
    "405": "Another method is served here",
    "408": "The request did not come in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Beyond a limit; Retry-After says when to come back",
    "431": "The request's line and headers are too large",
    "500": "A bug or a lost worker",
    "503": "Nobody can serve it now; Retry-After says when to come back",
    "504": "A deadline ran out",
}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID - 1}}
_TEXT = {"type": "string"}
_PROMPT = {
    "description": "Text, token ids, or a list of either",
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKEN_IDS},
    ],
}


def document() -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    chat = _request(ChatRequest, definitions)
    completion = _request(CompletionRequest, definitions)
    completion["properties"]["prompt"] = _PROMPT
    definitions |= {"ChatRequest": chat, "CompletionRequest": completion, **_answers()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Isthmus",
            "version": isthmus_shared.__version__,
            "description": "OpenAI's API, and vLLM's small extras. Where the server has API keys, each request but the "
            "operators' pages brings one.",
        },
        "paths": _paths(),
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _request(model: type[ChatRequest] | type[CompletionRequest], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions |= schema.pop("$defs", {})
    others: dict[str, Any] = {name: {"description": "Without effect here"} for name in sorted(HARMLESS)}
    others |= {name: {"enum": [None, *values]} for name, values in sorted(NEUTRAL.items()) if name != "best_of"}
    schema["properties"] = {**others, **schema["properties"]}
    return schema


def _answers() -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    error = {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT}
    return {
        "Error": _object({"error": _object(error)}),
        "Answer": _object(
            {
                "id": _TEXT,
                "object": {"enum": ["chat.completion", "text_completion"]},
                "created": count,
                "model": _TEXT,
                "choices": {"type": "array", "minItems": 1, "items": {"type": "object"}},
                "usage": _object({"prompt_tokens": count, "completion_tokens": count, "total_tokens": count}),
            }
        ),
        "Model": _object({"id": _TEXT, "object": {"const": "model"}, "created": count, "owned_by": _TEXT}),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _paths() -> dict[str, Any]:
    token_ids = {"type": "array", "maxItems": MAX_TOKENIZE, "items": {"type": "integer", "minimum": 0}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    models = _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}})
    tokenized = _object({"count": {"type": "integer"}, "max_model_len": {"type": "integer"}, "tokens": token_ids})
    pages = {
        f"/{page}": {"get": _operation(page, {"type": "object"}, keys=False)} for page in ("health", "live", "version")
    }
    return {
        "/v1/chat/completions": {"post": _operation("chat", _ref("Answer"), body=_ref("ChatRequest"), streams=True)},
        "/v1/completions": {
            "post": _operation("completion", _ref("Answer"), body=_ref("CompletionRequest"), streams=True)
        },
        "/v1/models": {"get": _operation("models", models)},
        "/v1/models/{name}": {"get": {**_operation("model", _ref("Model")), "parameters": [name]}},
        "/tokenize": {"post": _operation("tokenize", tokenized, body=_tokenize())},
        "/detokenize": {
            "post": _operation("detokenize", _object({"prompt": _TEXT}), body=_object({"tokens": token_ids}))
        },
        **pages,
    }


def _tokenize() -> dict[str, Any]:
    messages = {"type": "array", "minItems": 1, "items": _ref("ChatMessage")}
    properties = {"prompt": _PROMPT, "messages": messages, "model": {"type": ["string", "null"]}}
    return {"type": "object", "properties": properties, "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}


def _operation(
    name: str, answer: dict[str, Any], *, body: dict[str, Any] | None = None, streams: bool = False, keys: bool = True
) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": answer}}
    if streams:
        content[EVENTS] = {"schema": {**_object({"data": _TEXT}), "description": "One event: a chunk, or [DONE]"}}
    error = {"content": {JSON: {"schema": _ref("Error")}}}
    made: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "Done", "content": content},
            **{status: {"description": text, **error} for status, text in ERRORS.items()},
        },
        "security": [{"key": []}, {}] if keys else [],
    }
    if body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return made
