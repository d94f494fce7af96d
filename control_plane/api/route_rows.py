"""Rows of the route table by the right that a user needs; other rows are written as `Route`."""

from __future__ import annotations

from typing import Any

from control_plane.api.people import Needs
from wire.routes import Route


def viewer_row(name: str, path: str, response: Any, summary: str, **more: Any) -> Route:
    """Return a row that every user may read."""
    return Route(name, "GET", path, response=response, needs=Needs.VIEWER, summary=summary, **more)


def owner_row(name: str, call: str, response: Any, summary: str, **more: Any) -> Route:
    """Return a row for owners of the entitlement; `call` is method and path: `PUT /v1/jobs`."""
    return _row(Needs.OWNER, name, call, response, summary, more)


def operator_row(name: str, call: str, response: Any, summary: str, **more: Any) -> Route:
    """Return a row for operators; `call` as in `owner_row`."""
    return _row(Needs.OPERATOR, name, call, response, summary, more)


def _row(
    needs: Needs, name: str, call: str, response: Any, summary: str, more: dict[str, Any]
) -> Route:
    method, _, path = call.partition(" ")
    return Route(name, method, path, response=response, needs=needs, summary=summary, **more)
