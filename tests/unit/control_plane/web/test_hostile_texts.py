"""Texts from users and agents are shown as text, on every page and in every field.

The answers of all routes are built from their types. Each text is HTML of 10 kB, with marks that
reverse the direction of the following text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import msgspec
import msgspec.inspect as mi
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from control_plane.api.autoscale import Autoscale
from control_plane.api.routes import ROUTES
from control_plane.api.sizings import SizingView, SizingViews
from control_plane.identity.sessions import BrowserSessions
from control_plane.web.pages import PAGES
from control_plane.web.serving import TEXT_MAX, Console
from conveyor.runs import PipelineView, PipelineViews, RunHistory
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call

pytestmark = pytest.mark.behaviour("FE1")

HOSTILE = "\"><img src=x onerror=alert(1)>' onfocus=alert(2) \u202e{{ 7*7 }}\u200f" + "x" * 10_000


def made(kind: Any) -> Any:
    """Return a value of a type with a hostile text in every place for a text."""
    match kind:
        case mi.Metadata(type=inner):
            return made(inner)
        case mi.StructType(cls=cls, fields=fields):
            try:
                return cls(**{f.name: made(f.type) for f in fields})
            except ValueError:  # its fields exclude each other
                return cls(**{f.name: made(f.type) for f in fields if f.required})
        case mi.StrType():
            return HOSTILE
        case mi.EnumType(cls=cls):
            return next(iter(cls))
        case mi.BoolType():
            return True
        case mi.IntType() | mi.FloatType():
            return 1
        case mi.ListType(item_type=item) | mi.VarTupleType(item_type=item):
            found = [made(item)]
            return found if isinstance(kind, mi.ListType) else tuple(found)
        case mi.TupleType(item_types=items):
            return tuple(made(item) for item in items)
        case mi.FrozenSetType(item_type=item) | mi.SetType(item_type=item):
            return frozenset([made(item)])
        case mi.DictType(key_type=key, value_type=value):
            return {made(key): made(value)}
        case mi.UnionType(types=types):
            return made(next(one for one in types if not isinstance(one, mi.NoneType)))
        case mi.AnyType():
            return HOSTILE
    raise AssertionError(f"no value is made of {kind}")


def autoscaled(job: Any) -> Any:
    """Return a job with a policy, which excludes other fields of its file."""
    spec = msgspec.structs.replace(job.record.spec, autoscale=made(mi.type_info(Autoscale)))
    record = msgspec.structs.replace(job.record, spec=spec)
    return msgspec.structs.replace(job, record=record)


class HostileFrontEnd:
    """A front end whose every answer is hostile."""

    def __init__(self) -> None:
        self.sessions = BrowserSessions()
        self.handlers = {route.name: self._answer for route in ROUTES}

    def authorize(self, _: web.Request, __: Route) -> Peer:
        return Peer("operator", HOSTILE)

    def check(self, _: Call) -> None:
        pass

    async def audit_refusal(self, *_: object) -> None:
        pass

    async def _answer(self, call: Call) -> Any:
        if call.route.stream_out:
            return self._log()
        answer = made(mi.type_info(call.route.response))
        if call.route.name == "job_events":
            return msgspec.structs.replace(answer, more=False)
        if call.route.name == "get_job":
            return autoscaled(answer)
        if call.route.name == "list_jobs":
            return msgspec.structs.replace(answer, jobs=[autoscaled(job) for job in answer.jobs])
        return answer

    async def _log(self) -> AsyncIterator[bytes]:
        yield HOSTILE.encode()


class HostileServices:
    """An autoscaler and a conveyor whose every answer is hostile."""

    async def sizings(self) -> Any:
        return made(mi.type_info(SizingViews))

    async def sizing(self, _: str) -> Any:
        return made(mi.type_info(SizingView))

    async def pipelines(self) -> Any:
        return made(mi.type_info(PipelineViews))

    async def pipeline(self, _: str) -> Any:
        return made(mi.type_info(PipelineView))

    async def runs(self, _: str, __: int, ___: int | None = None) -> Any:
        return made(mi.type_info(RunHistory))


class Tags(HTMLParser):
    """Collects all tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
async def test_texts_of_users_and_agents_are_escaped_on_every_page(page: Any) -> None:
    app = web.Application()
    services: Any = HostileServices()
    Console(HostileFrontEnd(), ROUTES, lambda: 1, services=services).add_to(app)
    names = {name: quote(f"<u>{name}", safe="") for name in ("job", "machine", "pipeline")}
    path = page.path.format(index="1", **names)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get(path)
        text = await answer.text()
        assert answer.status == 200, text
        data = await (await client.get(f"{path}?format=json")).json()
    tags = Tags(text).found
    assert not {"img", "u"} & tags
    assert not [tag for tag in tags if re.search(r" (on|style)", tag)]
    assert "&lt;img src=x" in text
    assert "{{ 7*7 }}" in text
    assert not re.search("[\u202e\u200f]", text)
    assert "⟨U+202E⟩" in text
    assert max(map(len, re.findall("x+", text))) <= (10_000 if "logs" in path else TEXT_MAX)
    assert data["now"] > 0
