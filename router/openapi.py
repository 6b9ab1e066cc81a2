"""The OpenAPI document of the HTTP surface: `GET /openapi.json`. Made from the types themselves, so
that it cannot say anything else than they do.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import FlideError
from router.http_errors import STATUS
from router.options import CLASSES
from router.states_http import ACTIONS, LISTED, MOST_LISTED, PATH, Branch, Rollback

REF = "#/components/schemas/"
JSON = "application/json"

FAULTS = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["error_type", "message"],
                    "properties": {"error_type": {"type": "string"}, "message": {"type": "string"}},
                },
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["loc", "msg", "type"],
                        "properties": {
                            "loc": {"type": "array", "items": {}},
                            "msg": {"type": "string"},
                            "type": {"type": "string"},
                        },
                    },
                },
            ]
        }
    },
}
"""Body of every error."""

ID = {"type": "string", "pattern": "^[\\x20-\\x7e]{1,256}$"}


def document(limits: Mapping[str, int | float]) -> dict[str, Any]:
    """The document; limits: by the name of their option, told in the text."""
    told = ", ".join(f"{name} {value:,}" for name, value in limits.items())
    models: list[type[BaseModel]] = [DecisionRequest, DecisionResponse, Rollback, Branch]
    schemas = _schemas(models)
    schemas["Error"] = FAULTS
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flide-serve",
            "version": version("flide-serve"),
            "description": f"Decisions about states. Limits: {told}.",
        },
        "paths": {
            "/v1/systemone": {"post": _decide()},
            "/v1/models": {"get": _plain("What is served", "models")},
            **_states(),
            "/health": {"get": _plain("Whether a decision can be answered", "health", key=False)},
            "/version": {"get": _plain("Versions of server and model", "version", key=False)},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(models: list[type[BaseModel]]) -> dict[str, Any]:
    """By name; requests as they are read, answers as they are written."""
    modes: list[Any] = [
        (model, "serialization" if model is DecisionResponse else "validation") for model in models
    ]
    _, found = models_json_schema(modes, ref_template=REF + "{model}")
    return dict(found["$defs"])


def _decide() -> dict[str, Any]:
    headers = {
        "X-Session-Id": ("Names the state.", ID),
        "X-Request-Timeout-Ms": ("Until the answer is of no more use.", {"type": "integer"}),
        "X-Priority": ("Batch work may wait for what others leave.", {"enum": list(CLASSES)}),
    }
    return {
        "operationId": "decide",
        "summary": "Answers a decision request",
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in headers.items()
        ],
        "requestBody": _body("DecisionRequest"),
        "responses": _responses(_ref("DecisionResponse")),
        **_SECURITY,
    }


def _states() -> dict[str, Any]:
    one = [{"name": "id", "in": "path", "required": True, "schema": ID}]
    listing = [
        {"name": "limit", "in": "query", "schema": _between(1, MOST_LISTED, LISTED)},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
    paths: dict[str, Any] = {
        PATH: {"get": {**_plain("What is remembered", "states"), "parameters": listing}},
        f"{PATH}/{{id}}": {
            "get": {**_plain("One state", "state"), "parameters": one},
            "delete": {**_plain("Forgets a state", "forget"), "parameters": one},
        },
    }
    bodies = {"rollback": "Rollback", "branch": "Branch"}
    for action in ACTIONS:
        told = {**_plain(f"The action {action}", action), "parameters": one}
        if action in bodies:
            told["requestBody"] = _body(bodies[action])
        paths[f"{PATH}/{{id}}/{action}"] = {"post": told}
    return paths


_SECURITY: dict[str, Any] = {"security": [{"key": []}, {}]}


def _plain(summary: str, name: str, key: bool = True) -> dict[str, Any]:
    """An operation that answers an object."""
    found = {
        "operationId": name,
        "summary": summary,
        "responses": _responses({"type": "object"}),
    }
    return {**found, **_SECURITY} if key else found


def _responses(schema: dict[str, Any]) -> dict[str, Any]:
    """An answer, and every error of the tree by its status."""
    by_status: dict[int, list[type[FlideError]]] = {}
    for error, status in STATUS.items():
        by_status.setdefault(status, []).append(error)
    found: dict[str, Any] = {"200": {"description": "Answered", "content": _content(schema)}}
    for status, errors in sorted(by_status.items()):
        text = ", ".join(error.__name__ for error in errors)
        found[str(status)] = {"description": text, "content": _content(_ref("Error"))}
    return found


def _body(name: str) -> dict[str, Any]:
    return {"required": True, "content": _content(_ref(name))}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REF + name}


def _between(least: int, most: int, default: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most, "default": default}
