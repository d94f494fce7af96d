"""The OpenAPI 3.1 document of a route table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from wire.errors import Problem
from wire.routes import Route

_NUMBERS = frozenset(("since", "wait_s"))
_WHOLE = {"limit": 1} | dict.fromkeys(
    ("before", "columns", "epoch", "expect", "generation", "rows", "run", "tail"), 0
)
"""Parameters that are whole numbers, with their minima."""
_FLAGS = frozenset(
    ("all", "dry_run", "follow", "new", "previous", "simulated", "take_over", "tty", "unavailable")
)
_PATTERNS = {
    "digest": r"^sha256:[0-9a-f]{64}$(?!\n)",
    "index": r"^[0-9]{1,6}$(?!\n)",
    "task_id": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)",
}
"""Patterns of parameters by name, in the agent's and the front end's API. They match the checks of
the handlers."""
QUERY_MAX = 10**15
_REF = "#/components/schemas/{name}"


def document(title: str, version: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document as plain values; schemas come from the types themselves."""
    types = [t for r in routes for t in (r.request, r.response) if t is not None]
    schemas, components = msgspec.json.schema_components([*types, Problem], ref_template=_REF)
    schema_of = dict(zip(map(id, [*types, Problem]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _schema(name: str) -> dict[str, Any]:
    """Return the schema of a path or query parameter with this name."""
    if name in _NUMBERS:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": QUERY_MAX}
    if name in _WHOLE:
        return {"type": "integer", "minimum": _WHOLE[name], "exclusiveMaximum": QUERY_MAX}
    if name in _FLAGS:
        return {"type": "boolean"}
    if name in _PATTERNS:
        return {"type": "string", "pattern": _PATTERNS[name]}
    return {"type": "string", "minLength": 1}


def _operation(route: Route, schema_of: dict[int, Any]) -> dict[str, Any]:
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": _schema(n)} for n in route.parameters
    ] + [{"name": n, "in": "query", "required": False, "schema": _schema(n)} for n in route.query]
    ok: dict[str, Any] = {"description": "done"}
    if route.duplex:
        ok = {"description": "never: the answer is 101, and a websocket"}
    if route.stream_out:
        ok["content"] = {"application/octet-stream": {}}
    elif route.response is not None:
        ok["content"] = {"application/json": {"schema": schema_of[id(route.response)]}}
    problem = {"application/problem+json": {"schema": schema_of[id(Problem)]}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": parameters,
        "responses": {"200": ok, "default": {"description": "refused", "content": problem}},
    }
    if route.stream_in:
        operation["requestBody"] = {"content": {"application/octet-stream": {}}}
    elif route.request is not None:
        body = {"application/json": {"schema": schema_of[id(route.request)]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
