"""Long-lived sessions of every kind leave no object behind, in a server and in its client.

Both programs consist of these parts: `make_app` behind connection admission, and `WireClient`.
`TWINE_SESSIONS=5000` (`make soak-sessions`) runs this number of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from control_plane.front_end.access import Access
from control_plane.identity.authority import CertificateSubject, open_authority
from wire import tls
from wire.admission import ConnectionAdmission
from wire.client import WireClient
from wire.duplex import Duplex, Talk
from wire.limits import ConnectionLimits
from wire.listen import tcp_socket
from wire.routes import Route
from wire.server import Call, http_log, make_app

SESSIONS = int(os.environ.get("TWINE_SESSIONS", "30"))
BATCH = 10
SETTLE_S = 120.0
ROLES = ("user",)
BEGUN: set[int] = set()
NUMBERS = itertools.count()
EXEC = Route("exec", "GET", "/exec", duplex=True, roles=ROLES, needs="x")
LOGS = Route("logs", "GET", "/logs", stream_out=True, roles=ROLES, needs="x")
WAIT = Route("wait", "GET", "/wait", response=int, query=("wait_s",), roles=ROLES, needs="x")
CALL = Route("call", "GET", "/call", response=int, roles=ROLES, needs="x")


class Echo:
    """The server's routes: an echo, a log with an end, a log without one, a wait without news."""

    async def exec(self, _: Call) -> Talk:
        async def talk(other: Duplex) -> None:
            async for frame in other.frames():
                await other.send(frame)

        return talk

    async def logs(self, _: Call) -> AsyncIterator[bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"line\n"
            await asyncio.Event().wait()

        return chunks()

    async def wait(self, call: Call) -> int:
        BEGUN.add(int(float(call.query["wait_s"])))
        await asyncio.Event().wait()
        return 0

    async def call(self, _: Call) -> int:
        return 1


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of a closed session in a client lasts until its next heartbeat is due."""
    monkeypatch.setattr("wire.client.HEARTBEAT_S", 1.0)


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[ConnectionAdmission, str, ssl.SSLContext]]:
    authority = open_authority(folder / "authority.pem", "twine")
    own = authority.credential(CertificateSubject("component", "control-plane", ("127.0.0.1",)), "")
    context = tls.client_context(
        authority.credential(CertificateSubject("user", "ann"), ""), tls.CONTROL_PLANE
    )
    echo, routes = Echo(), (EXEC, LOGS, WAIT, CALL)
    handlers = {route.name: getattr(echo, route.name) for route in routes}
    app = make_app("x", routes, handlers, Access(owner_uid=0), version="0")
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    listener = tcp_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = tls.server_context(own, require_client=False)
    async with ConnectionAdmission(
        runner, listener, server, ConnectionLimits(), http_log("x")
    ) as admission:
        yield admission, f"https://127.0.0.1:{port}", context
        await runner.cleanup()


async def session(kind: str, client: WireClient) -> None:
    """Run one session that its client leaves in the middle or at its end."""
    if kind.startswith("exec"):
        async with client.open_duplex(EXEC) as talk:
            await talk.send("hello")
            if kind == "exec":
                await anext(aiter(talk.frames()))
    elif kind == "logs":
        lines = client.stream(LOGS)
        assert await anext(aiter(lines)) == b"line\n"
        await lines.aclose()  # type: ignore[attr-defined]
    elif kind == "wait":
        number = next(NUMBERS)
        waiting = asyncio.ensure_future(client.call(WAIT, wait_s=number))
        while number not in BEGUN:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
    else:
        await client.call(CALL)


async def have(
    kind: str, count: int, admission: ConnectionAdmission, url: str, context: ssl.SSLContext
) -> None:
    """Run this number of sessions, each on its own connections, and wait until they are gone."""

    async def one() -> None:
        async with WireClient(url, context, timeout_s=SETTLE_S) as client:
            await session(kind, client)

    for _ in range(0, count, BATCH):
        await asyncio.gather(*(one() for _ in range(BATCH)))
    async with asyncio.timeout(SETTLE_S):
        while admission.count() != (0, 0) or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.02)


def reachable() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.behaviour("BUG-HT21")
@pytest.mark.parametrize("kind", ["exec", "exec cut short", "logs", "wait", "call"])
async def test_a_session_leaves_no_object_behind(tmp_path: Path, kind: str) -> None:
    """Regression: each exec session left 180 KB in the control plane."""
    async with served(tmp_path) as (admission, url, context):
        await have(kind, 2 * BATCH, admission, url, context)
        before = reachable()
        await have(kind, SESSIONS, admission, url, context)
        async with asyncio.timeout(SETTLE_S):
            while reachable() - before >= 2 * SESSIONS + 100:
                await asyncio.sleep(0.2)


@pytest.mark.behaviour("BUG-HT21")
async def test_a_websocket_that_was_closed_is_no_cycle(tmp_path: Path) -> None:
    """A rarely collected old generation must not hold closed sessions."""
    async with served(tmp_path) as (admission, url, context):
        await have("exec", BATCH, admission, url, context)
        gc.collect()
        gc.disable()
        try:
            await have("exec", SESSIONS, admission, url, context)
            held = [one for one in gc.get_objects() if isinstance(one, web.WebSocketResponse)]
            assert not held
        finally:
            gc.enable()
