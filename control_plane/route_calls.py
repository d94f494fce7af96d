"""Calls of the front end's routes by name: what the parts of its client share."""

from __future__ import annotations

from typing import Any, TypeVar

from control_plane.api.routes import ROUTES
from wire.client import WireClient, answer_as

ROUTE = {route.name: route for route in ROUTES}
_T = TypeVar("_T")


class NamedCalls(WireClient):
    """A client whose methods name the route that they call, and the type of its answer."""

    async def ask(self, kind: type[_T], route: str, body: object = None, /, **given: Any) -> _T:
        """Return the answer of a route; raises what the front end raised, or `Unreachable`.

        `given` are its parameters, and `timeout_s` and `stream` of `WireClient.call`.
        """
        return answer_as(kind, await self.call(ROUTE[route], body, **given))
