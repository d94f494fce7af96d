"""The one-time link of `twinectl ui`, and when its console ends without a command."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from control_plane.cli import main
from control_plane.cli.program import EXIT_USAGE
from control_plane.cli.ui import IDLE_S, LINK_S, Gate, _handler, ui
from wire.errors import InvalidInput, Unreachable

pytestmark = pytest.mark.behaviour("FE1")


def opened(now: list[float]) -> tuple[Gate, str]:
    gate = Gate(8000, lambda: now[0])
    return gate, gate.url().rpartition("/")[2]


def test_a_link_is_void_after_ten_minutes_and_the_console_ends() -> None:
    now = [100.0]
    gate, link = opened(now)
    assert gate.is_over() == ""
    now[0] += LINK_S + 1
    assert gate.open(link) is None
    assert "was not opened within 10 minutes" in gate.is_over()


def test_a_link_works_once_and_only_its_browser_is_let_in() -> None:
    now = [100.0]
    gate, link = opened(now)
    assert gate.open("x" * 43) is None
    cookie = gate.open(link)
    assert cookie is not None
    assert gate.open(link) is None
    assert gate.refusal("127.0.0.1:8000", cookie) == ""
    assert gate.refusal("evil.example", cookie)
    assert gate.refusal("127.0.0.1:8000", "other")


def test_a_console_ends_without_requests_or_when_its_session_is_ended() -> None:
    now = [100.0]
    gate, link = opened(now)
    cookie = gate.open(link)
    now[0] += IDLE_S - 1
    assert gate.refusal("127.0.0.1:8000", cookie) == ""
    now[0] += IDLE_S - 1
    assert gate.is_over() == ""
    now[0] += 2
    assert "its browser sent no request" in gate.is_over()
    gate.ended.set()
    assert gate.is_over() == "its session was ended"


@pytest.mark.behaviour("BUG-UX99")
@pytest.mark.parametrize(
    "arguments", [["--end", "s1", "--sessions"], ["jobs", "--sessions"], ["../../etc"]]
)
def test_arguments_that_cannot_be_used_are_refused(arguments: list[str]) -> None:
    """Formerly `--sessions` together with `--end` was ignored, and any path was accepted as a
    page."""
    found = CliRunner().invoke(main, ["ui", *arguments])
    assert found.exit_code == EXIT_USAGE
    assert "exclude each other" in found.stderr or "is no page of the console" in found.stderr


class Reachable:
    """A target whose control plane accepts the caller."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        async def get_current_user() -> None: ...

        yield SimpleNamespace(get_current_user=get_current_user)


@pytest.mark.behaviour("BUG-UX180")
def test_a_port_in_use_is_named() -> None:
    """Formerly the message was about "a file"."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = CliRunner().invoke(ui, ["--port", str(port)], obj=Reachable())
    assert isinstance(found.exception, InvalidInput)
    assert str(found.exception) == f"cannot use port {port} of 127.0.0.1: Address already in use"


class Away:
    """A client whose control plane does not answer, or ends a stream in the middle."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    @asynccontextmanager
    async def forward(self, *_: object) -> AsyncIterator[Any]:
        away = Unreachable("cannot reach unix:/x: it is down", hint="is it started?")
        if not self._chunks:
            raise away

        async def iter_any() -> AsyncIterator[bytes]:
            for chunk in self._chunks:
                yield chunk
            raise away

        content = SimpleNamespace(iter_any=iter_any)
        yield SimpleNamespace(headers={}, status=200, content=content)


@pytest.mark.behaviour("BUG-UX178")
async def test_a_page_says_that_the_control_plane_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Formerly it was an internal error, with a traceback on the terminal."""
    app, gate = web.Application(), Gate()
    cookie = gate.open(gate.url().rpartition("/")[2])
    headers = {"Cookie": f"twine-console={cookie}"}
    down, ending = cast("Any", Away([])), cast("Any", Away([b"data: 1"]))
    app.router.add_get("/ui/", _handler(gate, "/ui/", down))
    app.router.add_get("/ui/changes", _handler(gate, "/ui/", ending))
    async with TestClient(TestServer(app)) as browser:
        gate.port = browser.port or 0
        answer = await browser.get("/ui/", headers=headers)
        assert (answer.status, await answer.text()) == (
            502,
            "cannot reach unix:/x: it is down\nis it started?",
        )
        stream = await browser.get("/ui/changes", headers=headers)
        assert await stream.content.readany() == b"data: 1"
    assert not caplog.records
