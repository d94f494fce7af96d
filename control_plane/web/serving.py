"""Adds the pages to the front end's application: HTML, the same as JSON, and a stream of changes.

A page calls routes through the front end's own handlers, so roles, ownership and the audit log are
those of the API. Forms are posted to `/ui/do/...` with a token that only the console's pages have.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
import msgspec
from aiohttp import web

from control_plane.api.people import Needs
from control_plane.identity.sessions import SessionEnded, SessionRefused
from control_plane.web.calls import Handlers, RouteCalls, SharedAnswers
from control_plane.web.core.page_json import as_json
from control_plane.web.core.usage import UsageHistory, about_size_of
from control_plane.web.forms import ACTIONS, FormAction, fields_of
from control_plane.web.page_request import Page, PageRequest
from control_plane.web.pages import PAGES
from control_plane.web.services import ServiceReader
from control_plane.web.streams import send_changes, send_log
from wire.errors import Forbidden, InvalidInput, NotFound, TwineError, Unauthenticated
from wire.fairness import Peer
from wire.peers import principal
from wire.routes import Route
from wire.server import Call, refuse_repeated, request_id

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILES = {
    "twine.css": "text/css",
    "twine.js": "text/javascript",
    "gantt.js": "text/javascript",
    "twine.svg": "image/svg+xml",
}
SESSION_COOKIE = "twine-session"
ENDED_HEADER = "Twine-Session"
"""Header of an answer: `ended` where the session of the browser was ended."""
TEXT_MAX = 600
"""Characters of a text that a page shows."""
_SESSION = web.RequestKey("session", str)
_HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u0000-\u0008\u000b-\u001f\u007f]")
"""Marks that change the direction of text, and control characters: shown by their code points."""
_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")


class Console:
    """The pages over the handlers of one front end."""

    def __init__(
        self,
        front_end: Handlers,
        routes: Iterable[Route],
        revision: Callable[[], int],
        *,
        services: ServiceReader | None = None,
        writes: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`revision` rises with each stored change; without `writes` there are no forms."""
        self._front_end, self._routes = front_end, {route.name: route for route in routes}
        self._revision, self._writes, self._clock = revision, writes, clock
        self._services = services or ServiceReader()
        self._key = secrets.token_bytes(32)
        self._shared, self._history = SharedAnswers(), UsageHistory()
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader,
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_show_hidden_marks,
        )
        self._templates.filters["ago"] = _ago
        self._templates.filters["stamp"] = _stamp
        self._templates.filters["clock"] = lambda at: time.strftime("%H:%M:%S", time.gmtime(at))
        self._templates.filters["whole"] = WholeText
        self._templates.filters["size"] = about_size_of
        self._templates.filters["digests"] = lambda text: _DIGEST.sub(r"\1…", text)
        self._templates.filters["number"] = lambda value: f"{value:,}".replace(",", "\u202f")

    def add_to(self, app: web.Application) -> None:
        """Add every page, the files and the stream."""
        for page in PAGES:
            app.router.add_get(page.path, partial(self._answer_page, page))
        for action in ACTIONS if self._writes else ():
            app.router.add_post(f"/ui/do/{action.route}", partial(self._submit_form, action))
        app.router.add_get("/ui/changes", self._changes)
        app.router.add_get("/ui/jobs/{job}/tasks/{index}/log-stream", self._log_stream)
        for name, kind in _FILES.items():
            app.router.add_get(f"/ui/static/{name}", partial(_static_file, name, kind))
        app.router.add_get("/ui", _redirect_to_region)
        app.router.add_get("/ui/{path:.*}", self._unknown_page)
        app.router.add_post("/ui/do/{path:.*}", self._unknown_page)

    # -- pages

    async def _answer_page(self, page: Page, request: web.Request) -> web.StreamResponse:
        """Answer a request for a page with HTML, JSON, or its error."""
        try:
            peer = self._authorize(request, page.path)
            values = await self._load_values(page, request)
        except TwineError as e:
            return await self._error_page(request, e)
        if request.query.get("format") == "json":
            packs = "gzip" in request.headers.get("Accept-Encoding", "")
            body = await asyncio.to_thread(as_json, values, packs=packs)
            headers = _HEADERS | ({"Content-Encoding": "gzip"} if packs else {})
            return web.Response(body=body, content_type="application/json", headers=headers)
        return await self._html_page(page.template, request, peer, values)

    async def _load_values(self, page: Page, request: web.Request) -> dict[str, Any]:
        """Return the values that a page shows; shared with other viewers if the page is."""
        _check_query(request, {"format", *page.parameters})
        if (form := request.query.get("format", "json")) != "json":
            raise InvalidInput(f"parameter format is json, not {form!r}")
        api = RouteCalls(self._front_end, self._routes, request)
        page_request = PageRequest(
            api=api,
            path=dict(request.match_info),
            query=dict(request.query),
            now=self._clock(),
            shared=self._shared,
            history=self._history,
            services=self._services,
            as_data=request.query.get("format") == "json",
        )

        async def load() -> dict[str, Any]:
            state = {"now": page_request.now, "revision": self._revision()}
            return state | await page.load(page_request)

        if not page.is_shared:
            return await load()
        query = sorted((k, v) for k, v in page_request.query.items() if k != "format")
        key = f"{page.path}?{query}"
        found: dict[str, Any] = await self._shared.get(key, load)
        return found

    async def _html_page(
        self,
        template: str,
        request: web.Request,
        peer: Peer,
        values: Mapping[str, Any],
        status: int = 200,
    ) -> web.Response:
        may = {action.route for action in ACTIONS if self._is_allowed(request, action.route)}
        may |= {"job_logs"} if self._is_allowed(request, "job_logs", form=False) else set()
        as_data = urlencode({**request.query, "format": "json"})
        every = values.get("every", 0)
        # In a thread: a page of 1,000 rows takes 20 ms, which would block the loop.
        text = await asyncio.to_thread(
            self._render,
            template,
            here=request.path,
            may=may.__contains__,
            writes=self._writes,
            as_data=f"{request.path}?{as_data}",
            token=self._token(peer, request),
            **{**values, "every": every},
        )
        response = web.Response(
            text=text, status=status, content_type="text/html", headers=_HEADERS
        )
        self._set_cookie(request, response)
        response.enable_compression()
        return response

    def _render(self, template: str, **values: Any) -> str:
        # Runs in the thread, too: a template is compiled at its first use, for up to 30 ms.
        return self._templates.get_template(template).render(values)

    def _is_allowed(self, request: web.Request, route: str, *, form: bool = True) -> bool:
        """Return whether the caller sees a form; the API checks again when it is sent.

        Forms for owners are shown only on the pages of jobs.
        """
        row, path = self._routes[route], dict(request.match_info)
        if row.needs == Needs.OWNER and "job" not in path:
            return False
        try:
            peer = self._front_end.authorize(request, row)
            self._front_end.check(Call(row, peer, None, path, {}, None, ""))
        except TwineError:
            return False
        return self._writes or not form

    async def _error_page(self, request: web.Request, error: TwineError) -> web.Response:
        """Return the page, or the problem document, of an error."""
        problem = msgspec.structs.replace(error.problem(), request_id=request_id())
        if request.query.get("format") == "json":
            body, kind = msgspec.json.encode(problem), "application/problem+json"
            response = web.Response(
                body=body, status=problem.status, content_type=kind, headers=_HEADERS
            )
        else:
            values = {"problem": problem, "now": self._clock(), "revision": 0}
            response = await self._html_page(
                "problem.html", request, Peer("", ""), values, problem.status
            )
        if isinstance(error, SessionRefused):  # the next request opens another session
            response.del_cookie(SESSION_COOKIE, path="/ui")
        if isinstance(error, SessionEnded):
            response.headers[ENDED_HEADER] = "ended"
        return response

    async def _unknown_page(self, request: web.Request) -> web.StreamResponse:
        """Answer a path that no page has with a page, not with a problem document."""
        try:
            self._authorize(request, "/ui/")
            hint = "the links above lead to all pages"
            raise NotFound(f"the console has no page {request.path}", hint=hint)
        except TwineError as e:
            return await self._error_page(request, e)

    # -- the caller

    def _authorize(self, request: web.Request, path: str) -> Peer:
        """Return the caller, or raise; records the browser as a session of the caller."""
        peer = self._front_end.authorize(request, Route("ui", "GET", path, needs=Needs.VIEWER))
        session = request.cookies.get(SESSION_COOKIE) or secrets.token_hex(6)
        request[_SESSION] = session
        shown = request.path if not request.path.startswith("/ui/changes") else ""
        browser = request.headers.get("User-Agent", "")
        self._front_end.sessions.record_request(
            session, principal(peer), shown, peer.address, browser
        )
        return peer

    def _set_cookie(self, request: web.Request, response: web.Response) -> None:
        session = request.get(_SESSION)
        if session and request.cookies.get(SESSION_COOKIE) != session:
            response.set_cookie(
                SESSION_COOKIE, session, path="/ui", secure=True, httponly=True, samesite="Strict"
            )

    def _token(self, peer: Peer, request: web.Request) -> str:
        """Return the secret token for forms of this caller's browser session."""
        subject = f"{peer.name} {request.get(_SESSION, '')}".encode()
        return hmac.new(self._key, subject, hashlib.sha256).hexdigest()

    # -- changes

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        try:
            peer = self._authorize(request, "/ui/changes")
            _check_query(request)
        except TwineError as e:
            return await self._error_page(request, e)
        check = partial(self._front_end.sessions.check, request[_SESSION], principal(peer))
        return await self._stream(request, lambda out: send_changes(out, self._revision, check))

    async def _log_stream(self, request: web.Request) -> web.StreamResponse:
        api = RouteCalls(self._front_end, self._routes, request)
        path = dict(request.match_info)
        try:
            peer = self._authorize(request, "/ui/log-stream")
            _check_query(request)
            await api.get("task_story", path)  # the log itself fails only when it is read
            chunks = await api.get("job_logs", path, follow="true", tail="0")
        except TwineError as e:
            return await self._error_page(request, e)
        check = partial(self._front_end.sessions.check, request[_SESSION], principal(peer))
        async with contextlib.aclosing(chunks):
            return await self._stream(request, lambda out: send_log(out, chunks, check))

    async def _stream(
        self, request: web.Request, send: Callable[[web.StreamResponse], Awaitable[None]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        # The browser left, or the task or the session ended: the browser may open another stream.
        with contextlib.suppress(ConnectionError, TimeoutError, TwineError):
            await send(response)
        return response

    # -- forms

    async def _submit_form(self, action: FormAction, request: web.Request) -> web.StreamResponse:
        """Carry out a form: the same route, with the same rights, as twinectl calls."""
        route, path = self._routes[action.route], dict[str, str]()
        try:
            _check_query(request)
            form = await fields_of(request)
            path = {name: form.pop(name, "") for name in route.parameters}
            peer = self._front_end.authorize(request, route)
            request[_SESSION] = session = request.cookies.get(SESSION_COOKIE, "")
            token = form.pop("token", "").encode()
            if not hmac.compare_digest(token, self._token(peer, request).encode()):
                raise Forbidden("the form is not of a page of this console", hint="load it again")
            self._front_end.sessions.check(session, principal(peer))
            back = form.pop("back", "/ui/")
            body = action.body(form) if action.body else None
            call = Call(route, peer, body, path, {}, None, request_id())
            await self._front_end.handlers[action.route](call)
        except TwineError as e:
            if isinstance(e, Forbidden | Unauthenticated):
                await self._front_end.audit_refusal(request, route, path, e)
            return await self._error_page(request, e)
        if not (back.startswith("/ui/") and back.isascii() and back.isprintable()):
            back = "/ui/"
        return _redirect(back, 303)


def _check_query(request: web.Request, allowed: Collection[str] = ()) -> None:
    """Raise `InvalidInput` for a parameter that is unknown or given twice."""
    if unknown := set(request.query) - {*allowed}:
        raise InvalidInput(
            f"this page has no parameter {', '.join(sorted(unknown))}",
            hint=f"its parameters: {', '.join(sorted(allowed)) or 'none'}",
        )
    refuse_repeated(request.query)


async def _static_file(name: str, kind: str, _: web.Request) -> web.Response:
    text = await asyncio.to_thread((_HERE / "static" / name).read_text)
    headers = _HEADERS | {"Cache-Control": "max-age=300"}
    return web.Response(text=text, content_type=kind, headers=headers)


async def _redirect_to_region(_: web.Request) -> web.Response:
    return _redirect("/ui/", 302)


def _redirect(path: str, status: int) -> web.Response:
    # A raised redirect would become a problem document.
    return web.Response(status=status, headers=_HEADERS | {"Location": path})


class WholeText(str):
    """A text that is shown at full length."""


def _show_hidden_marks(value: Any) -> Any:
    """Return a text with its invisible marks spelled out, so that no two names look alike.

    A long text is cut: texts of agents and owners may have 10 kB, too much for a table cell.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    if len(value) > TEXT_MAX and not isinstance(value, WholeText):
        value = f"{value[:TEXT_MAX]}… ({len(value)} characters)"
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value)


def _ago(at: float, now: float) -> str:
    """Return a time relative to now: `3 min ago`."""
    seconds = max(0.0, now - at)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
