"""`twinectl ui`: the web console in a browser, with the caller's own credential.

A browser has neither our certificate authority nor unix sockets. This command serves the console on
a loopback port and forwards each request with its credential. Only the browser that opened the
one-time link gets in: the link sets a cookie, and a second use of it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from control_plane.cli import show
from control_plane.cli.program import Target
from wire.errors import Forbidden, InvalidInput, TwineError

if TYPE_CHECKING:
    from aiohttp import web

    from control_plane.client import ControlPlaneClient

_COOKIE = "twine-console"
_FORWARDED = (
    *("Content-Type", "Location", "Cache-Control"),
    *("Content-Security-Policy", "X-Content-Type-Options", "X-Frame-Options"),
)
"""Headers of an answer that the browser gets."""
_SENT = ("Content-Type", "Accept", "User-Agent")
"""Headers of a request that the control plane gets."""
_SESSION_COOKIE, _ENDED_HEADER = "twine-session", "Twine-Session"
"""The cookie identifies a browser to the control plane; the header reports an ended session."""
_BODY_MAX = 64 << 10
LINK_S, IDLE_S = 600.0, 3600.0
"""A link is valid for `LINK_S`. A console ends after `IDLE_S` without requests; an open page
sends one every few minutes."""


class Gate:
    """Admits one browser, by a one-time link and then by a cookie that only this process knows."""

    def __init__(self, port: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._made_at, self.last_request_at = clock, clock(), clock()
        self._link, self._cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.port, self.session = port, secrets.token_hex(6)
        self.ended = asyncio.Event()
        """Set once the control plane reports the session as ended."""

    def url(self) -> str:
        """Return the one-time link."""
        return f"http://127.0.0.1:{self.port}/open/{self._link}"

    def open(self, link: str) -> str | None:
        """Return the cookie for the right link, once; None otherwise."""
        if not self._link or not hmac.compare_digest(link.encode(), self._link.encode()):
            return None
        if self._clock() - self._made_at > LINK_S:
            return None
        self._link, self.last_request_at = "", self._clock()
        return self._cookie

    def is_over(self) -> str:
        """Return why the console has to end; empty: it continues."""
        if self.ended.is_set():
            return "its session was ended"
        if self._link and self._clock() - self._made_at > LINK_S:
            return f"its link was not opened within {LINK_S / 60:.0f} minutes"
        if self._clock() - self.last_request_at > IDLE_S:
            return f"its browser sent no request for {IDLE_S / 60:.0f} minutes"
        return ""

    def refusal(self, host: str, cookie: str) -> str:
        """Return why a request is refused; empty: it is accepted.

        The name in `Host` is checked, so that no other site's name can be pointed at this port.
        """
        if host != f"127.0.0.1:{self.port}":
            return f"this console is at 127.0.0.1:{self.port}"
        if not hmac.compare_digest(cookie.encode(), self._cookie.encode()):
            return "open the link that `twinectl ui` printed; it works once, in one browser"
        self.last_request_at = self._clock()
        return ""


@click.command()
@click.argument("page", default="")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, help="Port of 127.0.0.1 [default: any]."
)
@click.option("--sessions", is_flag=True, help="List the browsers that have the console open.")
@click.option("--end", metavar="SESSION", help="End the session of a browser.")
@click.pass_obj
def ui(target: Target, page: str, port: int, sessions: bool, end: str | None) -> None:
    """Serve the web console to one browser on this computer until Ctrl-C.

    PAGE opens first: `jobs/web`, `machines/m1`; default: the region. Users see and end their own
    sessions, operators all.
    """
    if (end is not None) + sessions + bool(page) > 1:
        raise click.UsageError("PAGE, --sessions and --end exclude each other")
    if ".." in page.split("/"):
        raise click.UsageError(f"{page!r} is no page of the console; say for instance jobs/web")
    if end is not None:
        target.ask(lambda client: client.end_session(end))
        click.echo(f"session {end} is ended")
        return
    if sessions:
        _print_sessions(target)
        return
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(target, "/ui/" + page.removeprefix("/ui").lstrip("/"), port))


def _print_sessions(target: Target) -> None:
    found = target.ask(lambda client: client.list_sessions()).sessions
    now = time.time()
    rows = [
        [one.session, one.who, one.address or "socket", show.duration(now - one.seen_at), one.page]
        for one in found
    ]
    show.table(("SESSION", "WHO", "FROM", "SEEN", "PAGE"), rows)


async def _serve(target: Target, page: str, port: int) -> None:
    from aiohttp import web

    async with target.client() as client:
        await client.get_current_user()  # a bad credential ends the command before a browser opens
        gate = Gate()
        app = web.Application(client_max_size=_BODY_MAX)
        app.router.add_route("*", "/{path:.*}", _handler(gate, page, client))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            try:
                await site.start()
            except OSError as e:
                why = os.strerror(e.errno or 0)
                raise InvalidInput(
                    f"cannot use port {port} of 127.0.0.1: {why}",
                    hint="leave --port out for any free port",
                ) from e
            gate.port = runner.addresses[0][1]
            click.echo(f"open {gate.url()}\nCtrl-C ends it.")
            while not (why := gate.is_over()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gate.ended.wait(), 1.0)
            raise Forbidden(f"the console ends: {why}", hint="start twinectl ui again")
        finally:
            await runner.cleanup()


def _handler(
    gate: Gate, page: str, client: ControlPlaneClient
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    from aiohttp import web

    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.startswith("/open/") and request.method == "GET":
            cookie = gate.open(path.removeprefix("/open/"))
            if cookie is not None:
                answer = web.HTTPSeeOther(page)
                answer.set_cookie(
                    _COOKIE, cookie, secure=True, httponly=True, samesite="Strict", path="/"
                )
                raise answer
        if why := gate.refusal(request.host, request.cookies.get(_COOKIE, "")):
            return web.Response(status=403, text=why)
        if not path.startswith("/ui/") or request.method not in ("GET", "POST"):
            return web.Response(status=404, text="the console is at /ui/")
        return await _forward(client, request, gate)

    return handle


async def _forward(
    client: ControlPlaneClient, request: web.Request, gate: Gate
) -> web.StreamResponse:
    """Forward a request and its answer in parts as they arrive: a stream of changes never ends."""
    from aiohttp import web

    headers = {name: request.headers[name] for name in _SENT if name in request.headers}
    headers["Cookie"] = f"{_SESSION_COOKIE}={gate.session}"
    body = await request.read()
    response: web.StreamResponse | None = None
    try:
        async with client.forward(request.method, request.path_qs, body, headers) as answer:
            if answer.headers.get(_ENDED_HEADER) == "ended":
                gate.ended.set()
            kept = {n: answer.headers[n] for n in _FORWARDED if n in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionError):  # the browser left
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
    except TwineError as e:
        if response is None:
            return web.Response(status=502, text=f"{e}\n{e.hint}")
        response.force_close()  # the control plane ended a stream: the page opens another
    return response
