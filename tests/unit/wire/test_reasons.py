"""Why a connection failed, in messages of our own."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from wire.client import WireClient
from wire.error_text import why
from wire.errors import ProtocolError
from wire.routes import Route

pytestmark = pytest.mark.behaviour("BUG-AG17")

ROUTE = Route("get_job", "GET", "/v1/jobs")


def connect_failed(number: int) -> aiohttp.ClientConnectorError:
    """Return what aiohttp raises, with the text that asyncio puts into it."""
    cause = OSError(number, "Connect call failed ('127.0.0.1', 20001)")
    key = aiohttp.client_reqrep.ConnectionKey("127.0.0.1", 20001, True, True, None, None, None)
    return aiohttp.ClientConnectorError(key, cause)


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ECONNREFUSED, "nothing listens there (the connection was refused)"),
        (errno.EHOSTUNREACH, "there is no route to its host"),
        (errno.ETIMEDOUT, "it did not answer in time"),
        (errno.ENOTCONN, "Transport endpoint is not connected"),
    ],
)
def test_the_error_of_a_failed_connection_follows_from_its_errno(number: int, message: str) -> None:
    """`Cannot connect to host … ssl:default [Connect call failed …]` helps no user."""
    assert why(connect_failed(number)) == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] x"), "nothing"),
        (
            OSError("Multiple exceptions: [Errno 110] Connect call failed, [Errno 101] x"),
            "it did not answer in time; there is no route to its network",
        ),
        (TimeoutError(), "it did not answer in time"),
        (socket.gaierror(-2, "Name or service not known"), "its name cannot be resolved"),
        (aiohttp.ServerDisconnectedError(), "it closed the connection without an answer"),
        (ssl.SSLCertVerificationError(1, "expected to reach /host/a, but /host/b"), "expected to"),
        (ssl.SSLError(1, "[SSL: X] y (_ssl.c:1)"), "the connection cannot be secured with TLS"),
        (aiohttp.ClientError("Cannot write to closing transport"), "the connection broke off"),
    ],
)
def test_every_kind_of_failure_has_a_message(error: Exception, message: str) -> None:
    assert why(error).startswith(message)
    assert not any(text in why(error) for text in ("_ssl", "Errno", "ssl:default", "call failed"))


@pytest.mark.behaviour("BUG-AG17")
async def test_a_caller_gets_an_error_that_names_where_nothing_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        async with WireClient(f"https://127.0.0.1:{port}") as client:
            with pytest.raises(Exception, match="cannot call GET /v1/jobs at https") as failure:
                await client.call(ROUTE)
    assert str(failure.value) == (
        f"cannot call GET /v1/jobs at https://127.0.0.1:{port}: "
        "nothing listens there (the connection was refused)"
    )


@pytest.mark.behaviour("BUG-HT9", "BUG-CP23")
async def test_an_endless_answer_is_not_kept_in_memory(tmp_path: Path) -> None:
    """Formerly an agent's endless answer took 2.2 GB in 20 s."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * (1 << 20))
        return response

    app = web.Application()
    app.router.add_get("/v1/jobs", endless)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        async with WireClient(f"unix:{tmp_path}/s") as client:
            with pytest.raises(ProtocolError, match="with more than 64MiB"):
                await client.call(ROUTE)
    finally:
        await runner.cleanup()
