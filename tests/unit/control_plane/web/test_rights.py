"""A viewer sees no form, and a request that a form would send is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from control_plane.api.people import Needs
from control_plane.api.rebalancing import RebalanceHistory, RebalanceStatus
from control_plane.api.routes import ROUTES
from control_plane.api.settings import RebalanceMode
from control_plane.identity.sessions import BrowserSessions
from control_plane.web.serving import SESSION_COOKIE, Console
from wire.errors import Forbidden
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call, Handler

pytestmark = pytest.mark.behaviour("FE1", "FE7")


class FrontEndStub:
    """A front end whose caller is a viewer or an operator."""

    def __init__(self, *, operator: bool) -> None:
        self.operator, self.paused, self.sessions = operator, 0, BrowserSessions()
        self.handlers: dict[str, Handler] = {
            "rebalance_status": self._status,
            "rebalance_history": self._history,
            "pause_rebalance": self._pause,
        }

    def authorize(self, _: web.Request, route: Route) -> Peer:
        if route.needs is not Needs.VIEWER and not self.operator:
            raise Forbidden("a viewer may not")
        return Peer("operator", "ann")

    def check(self, _: Call) -> None:
        pass

    async def audit_refusal(self, *_: object) -> None:
        pass

    async def _status(self, _: Call) -> Any:
        return RebalanceStatus(mode=RebalanceMode.OFF, paused=False)

    async def _history(self, _: Call) -> Any:
        return RebalanceHistory(moves=[])

    async def _pause(self, call: Call) -> Any:
        self.paused += 1
        assert call.body.reason == "quiet"


async def opened(front_end: FrontEndStub, *, writes: bool = True) -> AsyncIterator[TestClient]:
    app = web.Application()
    Console(front_end, ROUTES, lambda: 1, writes=writes).add_to(app)
    async with TestClient(TestServer(app), cookies={SESSION_COOKIE: "a" * 12}) as client:
        yield client


@pytest.mark.parametrize(("operator", "writes"), [(False, True), (True, False)])
async def test_no_form_is_shown_or_accepted_without_rights_or_writes(
    operator: bool, writes: bool
) -> None:
    front_end = FrontEndStub(operator=operator)
    async for client in opened(front_end, writes=writes):
        page = await (await client.get("/ui/rebalance")).text()
        assert "Moves that ended" in page
        assert "<form" not in page
        answer = await client.post("/ui/do/pause_rebalance", data={"reason": "quiet"})
        assert answer.status in (403, 404)
    assert front_end.paused == 0


async def test_an_operator_sees_the_form_and_can_send_it() -> None:
    front_end = FrontEndStub(operator=True)
    async for client in opened(front_end):
        page = await (await client.get("/ui/rebalance")).text()
        token = page.partition('name="token" value="')[2].partition('"')[0]
        form = {"reason": "quiet", "token": token, "back": "//evil.example"}
        answer = await client.post("/ui/do/pause_rebalance", data=form, allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/ui/")
    assert front_end.paused == 1
