"""Parameters, forms and paths that no link of the console has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from test_rights import FrontEndStub

from control_plane.api.people import AuditPage
from control_plane.api.routes import ROUTES
from control_plane.web.serving import SESSION_COOKIE, Console
from wire.server import Call

pytestmark = pytest.mark.behaviour("FE1")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Region(FrontEndStub):
    """A front end with an old audit log."""

    def __init__(self) -> None:
        super().__init__(operator=True)
        self.handlers |= {"list_audit": self._audit}
        self.before = ""

    async def _audit(self, call: Call) -> Any:
        self.before = call.query.get("before", "")
        return AuditPage(entries=[], next=12_345_678)


@asynccontextmanager
async def opened(region: Region) -> AsyncIterator[TestClient]:
    app = web.Application()
    Console(region, ROUTES, lambda: 1).add_to(app)
    async with TestClient(TestServer(app), cookies={SESSION_COOKIE: "a" * 12}) as client:
        yield client


@pytest.mark.behaviour("BUG-UX154")
async def test_the_audit_log_has_pages_beyond_a_million_entries() -> None:
    """Regression: its link to older entries was refused."""
    region = Region()
    async with opened(region) as client:
        text = await (await client.get("/ui/audit")).text()
        link = text.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")
        assert (await client.get(f"/ui/audit{link}")).status == 200
        assert region.before == "12345678"
        for number in ("9" * 18, "9" * 40):
            assert (await client.get(f"/ui/audit?before={number}")).status == 400
