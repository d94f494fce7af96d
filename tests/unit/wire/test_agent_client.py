"""What a client sends, and how much it accepts from a server that answers without end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent import client as agent_client
from agent.client import AgentClient
from wire.client import WireClient
from wire.errors import ProtocolError, Unreachable
from wire.routes import Route

CHUNK = b" " * 65_536


@asynccontextmanager
async def _server(socket: Path, handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield f"unix:{socket}"
    finally:
        await runner.cleanup()


@pytest.mark.behaviour("BUG-UX82")
async def test_the_error_of_a_failed_call_names_its_path(tmp_path: Path) -> None:
    """Formerly the message used the words of the route's name: "cannot region status at …"."""
    async with AgentClient(f"unix:{tmp_path}/none") as client:
        with pytest.raises(Unreachable, match=r"^cannot call GET /v1/tasks/web/logs at "):
            _ = [chunk async for chunk in client.task_logs("web")]
        with pytest.raises(Unreachable, match=r"^cannot call GET /v1/tasks at unix:"):
            await client.list_tasks()


@pytest.mark.behaviour("BUG-HT9", "BUG-CP23")
@pytest.mark.parametrize("status", [200, 500])
async def test_an_endless_answer_is_cut_off_with_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Formerly an agent's endless answer filled the control plane's memory."""
    monkeypatch.setattr(AgentClient, "max_answer_bytes", 1 << 20)
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while sent < 64 << 20:
            await response.write(CHUNK)
            sent += len(CHUNK)
        return response

    async with _server(tmp_path / "s", endless) as endpoint, AgentClient(endpoint) as client:
        with pytest.raises(ProtocolError, match="list_tasks"):
            await client.list_tasks()
    assert sent < 16 << 20


@pytest.mark.behaviour("BUG-AG54")
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "data", [b'{"tasks": "\xff"}', b'{"code": "\xff"}', b'{"x":' + b"[" * 9999]
)
async def test_an_answer_that_cannot_be_decoded_is_an_error_of_its_server(
    tmp_path: Path, status: int, data: bytes
) -> None:
    """For such bytes the decoder raises other errors, which no caller expects."""

    async def odd(_: web.Request) -> web.Response:
        return web.Response(body=data, status=status, content_type="application/json")

    async with _server(tmp_path / "s", odd) as endpoint, AgentClient(endpoint) as client:
        with pytest.raises(ProtocolError, match="list_tasks"):
            await client.list_tasks()


async def test_a_small_answer_that_unpacks_to_a_large_one_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentClient, "max_answer_bytes", 1 << 20)
    packed = gzip.compress(b" " * (8 << 20))

    async def bomb(_: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with _server(tmp_path / "s", bomb) as endpoint, AgentClient(endpoint) as client:
        with pytest.raises(ProtocolError, match="list_tasks"):
            await client.list_tasks()


async def test_a_large_answer_within_the_limit_is_read_whole(tmp_path: Path) -> None:
    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b'{"tasks": []' + b" " * (2 << 20) + b"}")

    async with _server(tmp_path / "s", large) as endpoint:
        async with AgentClient(endpoint) as client:
            assert (await client.list_tasks()).tasks == []
        async with WireClient(endpoint) as client:
            client.max_answer_bytes = 1 << 20
            with pytest.raises(ProtocolError):
                await client.call(agent_client._ROUTE["list_tasks"])


async def test_requests_to_an_older_agent_use_its_format(tmp_path: Path) -> None:
    queries: list[str] = []

    async def earlier(request: web.Request) -> web.Response:
        queries.append(request.query_string)
        return web.Response(body=b'{"events": [], "latest": 7}')

    async with _server(tmp_path / "s", earlier) as endpoint, AgentClient(endpoint) as client:
        client.epoch = lambda: 5
        for _ in range(2):
            await client.get_events(7, 1.0)
    assert queries == ["after=7&wait_s=1.0"] * 2


@pytest.mark.behaviour("BUG-HT6")
async def test_commands_do_not_wait_behind_readers(tmp_path: Path) -> None:
    """Formerly 130 followers of silent logs took all connections to an agent."""
    reading = 0
    enough = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal reading
        if not request.path.endswith("/logs"):
            return web.json_response({"tasks": []})
        response = web.StreamResponse()
        await response.prepare(request)
        reading += 1
        if reading == 100:
            enough.set()
        await asyncio.Event().wait()
        return response

    async def follow(client: AgentClient) -> None:
        async for _ in client.task_logs("web-0", follow=True):
            pass

    async with _server(tmp_path / "a.sock", answer) as endpoint, AgentClient(endpoint) as client:
        followers = [asyncio.ensure_future(follow(client)) for _ in range(130)]
        await enough.wait()
        assert (await client.list_tasks()).tasks == []
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


@pytest.mark.behaviour("BUG-CP55")
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_a_request_whose_answer_is_lost_is_sent_once(tmp_path: Path, method: str) -> None:
    """Formerly aiohttp sent it again on a new connection, and overwrote what others wrote in
    between."""
    route, received = Route("put_thing", method, "/thing"), 0

    async def made(request: web.Request) -> web.Response:
        nonlocal received
        received += 1
        if received == 2 and request.transport is not None:
            request.transport.abort()
        return web.json_response({})

    async with _server(tmp_path / "s", made) as endpoint, WireClient(endpoint) as client:
        await client.call(route)  # opens the connection that breaks on the next call
        with pytest.raises(Unreachable, match=rf"cannot call {method} /thing"):
            await client.call(route)
        assert received == 2
        await client.call(route)
    assert received == 3
