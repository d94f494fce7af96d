"""Answers with long lists, and repeated parameters."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec import Meta

from control_plane.api.jobs import JobRecord, JobSpec
from wire import server
from wire.fairness import Peer
from wire.json_parts import has_many, json_parts, long_fields
from wire.routes import Route
from wire.server import Call, make_app


class Item(msgspec.Struct, frozen=True):
    """An object with a list of its own."""

    name: str
    tasks: list[int]


class Items(msgspec.Struct, frozen=True):
    """The answer of the route."""

    items: list[Item]


ROUTES = [
    Route("many", "GET", "/many", response=Items, query=("limit",)),
    Route("few", "GET", "/few", response=Items),
]
MANY = Items(items=[Item(name=f"job-{n}", tasks=list(range(40))) for n in range(20_000)])


@pytest.mark.behaviour("BUG-UX160")
async def test_other_requests_are_answered_while_a_long_answer_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the event loop waited until the whole answer was encoded."""
    monkeypatch.setattr(server, "_ENCODE_S", 0.0)
    turns_of, done = dict[str, int](), dict[str, bytes]()

    async def many(_: Call) -> Items:
        return MANY

    async def few(_: Call) -> Items:
        return Items(items=[])

    handlers: dict[str, Any] = {"many": many, "few": few}
    app = make_app("x", ROUTES, handlers, lambda *_: Peer("ann", "user"), version="0")
    async with TestClient(TestServer(app)) as client:

        async def read(path: str) -> None:
            done[path] = await (await client.get(path)).read()

        async def count(path: str) -> None:
            reading, turns = asyncio.create_task(read(path)), 0
            while not reading.done():
                turns += 1
                await asyncio.sleep(0)
            turns_of[path] = turns

        await count("/few")
        await count("/many")
    assert json.loads(done["/many"]) == msgspec.to_builtins(MANY)
    assert turns_of["/many"] > turns_of["/few"] + len(list(json_parts(MANY))) / 2


@pytest.mark.behaviour("BUG-UX160")
@pytest.mark.parametrize(
    "value",
    [MANY, [], {}, list(range(300)), {"a": [MANY.items[:3]] * 70, "b": {}}, {3: list(range(99))}],
)
def test_parts_are_the_same_json_as_the_whole_and_small(value: Any) -> None:
    parts = list(json_parts(value))
    assert b"".join(parts) == msgspec.json.encode(value)
    assert max(map(len, parts)) < 100_000


@pytest.mark.behaviour("BUG-UX161")
async def test_a_parameter_that_is_given_twice_is_refused() -> None:
    """Regression: one of the values was ignored silently."""
    called = list[str]()

    async def many(call: Call) -> Items:
        called.append(call.query["limit"])
        return Items(items=[])

    handlers: dict[str, Any] = {"many": many, "few": many}
    app = make_app("x", ROUTES, handlers, lambda *_: Peer("ann", "user"), version="0")
    async with TestClient(TestServer(app)) as client:
        for query in ("limit=1&limit=2", "limit=1&limit=1"):
            answer = await client.get(f"/many?{query}")
            problem = await answer.json()
            assert (answer.status, problem["code"]) == (400, "invalid_input")
            assert problem["detail"] == "query parameter limit is given more than once"
    assert called == []


@pytest.mark.behaviour("BUG-UX168")
async def test_metrics_and_the_api_document_refuse_parameters() -> None:
    """Regression: they ignored them, unlike all other paths."""

    async def many(_: Call) -> Items:
        return Items(items=[])

    handlers: dict[str, Any] = {"many": many, "few": many}
    peer = Peer("ann", "user")
    app = make_app("x", ROUTES, handlers, lambda *_: peer, version="0", metrics=lambda: b"")
    async with TestClient(TestServer(app)) as client:
        for path in ("/metrics", "/openapi.json"):
            assert (await client.get(path)).status == 200
            problem = await (await client.get(f"{path}?x=1&x=2")).json()
            assert problem["detail"] == f"GET {path} has no parameter x"


class _Limited(msgspec.Struct):
    short: Annotated[list[_Limited], Meta(max_length=50)] = []
    names: dict[str, str] = {}
    any_number: list[_Limited] = []


@pytest.mark.behaviour("BUG-CP133")
def test_only_lists_that_may_have_many_structs_are_looked_into() -> None:
    """Looking into each list of an answer took 18 times as long as encoding it."""
    assert long_fields(JobSpec) == ()
    assert "tasks" in long_fields(JobRecord)
    assert long_fields(_Limited) == ("short", "any_number")
    assert not has_many(_Limited(names={str(n): "" for n in range(100)}))
    assert has_many(_Limited(short=[_Limited(any_number=[_Limited()] * 100)]))
