"""Calls of the front end's handlers for the viewer of a page, and answers that viewers share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from control_plane.identity.sessions import BrowserSessions
from wire.errors import TwineError
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call, Handler, request_id

FRESH_S, STALE_S, SHARED_MAX = 2.0, 10.0, 64
"""Shared answers: seconds for which they are fresh, seconds for which they are usable while the
next one is computed, and the number that is kept."""
COST_SHARE, FRESH_MAX_S = 0.05, 30.0
"""A slow answer is fresh for longer, so that computing it takes at most 5 % of a core."""
OPTIONAL_S = 0.1
"""Time limit of an optional part of a page."""
LONG_DELAY_S = 0.5
"""Delay before the long computation of an optional part begins."""


class Handlers(Protocol):
    """What the console needs of the front end."""

    handlers: dict[str, Handler]
    """Route → handler, behind the guard and the audit log."""
    sessions: BrowserSessions
    """Browsers that have the console open."""

    def authorize(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise if the route's rule refuses it."""
        ...

    def check(self, call: Call) -> None:
        """Raise `Forbidden` if the caller may not make this call."""
        ...

    async def audit_refusal(
        self, request: web.Request, route: Route, path: Mapping[str, str], error: TwineError
    ) -> None:
        """Write the refusal of a form to the audit log, unless it is there already."""
        ...


class RouteCalls:
    """Calls the front end's handlers as the caller of a request."""

    def __init__(
        self,
        front_end: Handlers,
        routes: Mapping[str, Route],
        request: web.Request,
    ) -> None:
        self._front_end, self._routes, self._request = front_end, routes, request

    async def get(self, route: str, path: Mapping[str, str] = {}, /, **query: str) -> Any:
        """Return the answer of a route; raises what the route raises."""
        return await self.prepare(route, path, **query)()

    def prepare(
        self, route: str, path: Mapping[str, str] = {}, /, **query: str
    ) -> Callable[[], Awaitable[Any]]:
        """Return a call that gets the answer, also after the request; raises if refused."""
        row = self._routes[route]
        peer = self._front_end.authorize(self._request, row)
        given = {name: value for name, value in query.items() if value}
        call = Call(row, peer, None, path, given, None, request_id())
        return partial(self._front_end.handlers[route], call)

    async def read_end(
        self, route: str, path: Mapping[str, str], most: int, /, **query: str
    ) -> bytes:
        """Return the last `most` bytes of a route that streams; raises what the route raises."""
        kept = b""
        async with contextlib.aclosing(await self.get(route, path, **query)) as chunks:
            async for chunk in chunks:
                kept = (kept + chunk)[-most:]
        return kept


class SharedAnswers:
    """Answers about a whole region that all viewers share; they are computed once, not per browser.

    While a new answer is computed, the old one is returned for some seconds more: the page shows
    its age ("as of"), and a viewer never waits for 50,000 machines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._answers: dict[str, tuple[float, float, Any]] = {}
        """Key → when its computation began, how long it is fresh, and the answer."""
        self._loading: dict[str, asyncio.Task[Any]] = {}

    async def get(self, key: str, load: Callable[[], Awaitable[Any]]) -> Any:
        """Return an answer that is not stale; raises what `load` raises."""
        at, fresh_s, answer = self._answers.get(key, (0.0, 0.0, None))
        age = self._clock() - at
        if answer is not None and age < fresh_s:
            return answer
        self._start_loading(key, load)
        if answer is not None and age < fresh_s + STALE_S - FRESH_S:
            return answer
        return await asyncio.shield(self._loading[key])

    async def get_if_quick(
        self, key: str, load: Callable[[], Awaitable[Any]], *, is_long: bool = False
    ) -> Any:
        """Return an answer like `get`, or None if it takes longer than `OPTIONAL_S`.

        The first computation of an `is_long` answer begins `LONG_DELAY_S` later, and
        the call returns None.
        """
        if is_long and key not in self._answers:
            asyncio.get_running_loop().call_later(LONG_DELAY_S, self._load_first, key, load)
            return None
        try:
            async with asyncio.timeout(OPTIONAL_S):
                return await self.get(key, load)
        except TimeoutError:
            return None

    def _start_loading(self, key: str, load: Callable[[], Awaitable[Any]]) -> None:
        """Start the computation of an answer unless it runs already."""
        if key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load(key, load))
            self._loading[key].add_done_callback(lambda task: self._finish_loading(key, task))

    def _load_first(self, key: str, load: Callable[[], Awaitable[Any]]) -> None:
        if key not in self._answers:
            self._start_loading(key, load)

    async def _load(self, key: str, load: Callable[[], Awaitable[Any]]) -> Any:
        began = self._clock()
        answer = await load()
        self._answers.pop(key, None)
        took_s = self._clock() - began
        fresh_s = min(FRESH_MAX_S, max(FRESH_S, took_s / COST_SHARE))
        self._answers[key] = began, fresh_s, answer
        while len(self._answers) > SHARED_MAX:
            del self._answers[next(iter(self._answers))]  # the oldest one
        return answer

    def _finish_loading(self, key: str, task: asyncio.Task[Any]) -> None:
        self._loading.pop(key, None)
        if not task.cancelled():
            task.exception()  # waiting callers raise it; without any, asyncio must not log it
