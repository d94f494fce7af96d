"""Adds the pages to the front end's application: HTML, the same as JSON, and a stream of changes.

A page calls routes through the front end's own handlers, so roles, ownership and the audit log are
those of the API. Forms are posted to `/ui/do/...` with a token that only our pages know.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jinja2
import msgspec
from aiohttp import web

from control_plane.api.capacity import DecisionNote
from control_plane.api.health import ConfirmDown
from control_plane.api.inventory import Drain, Undrain
from control_plane.api.people import Needs
from control_plane.api.rebalancing import PauseWish
from control_plane.web.pages import PAGES, Page, PageRequest
from control_plane.web.streams import send_changes, send_log
from wire.errors import Forbidden, InvalidInput, TwineError
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call, Handler, request_id
from wire.units import about_size

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
    "twine.svg": "image/svg+xml",
}
FORM_MAX = 64 << 10
FRESH_S, STALE_S, SHARED_MAX = 2.0, 10.0, 64
"""Of answers that viewers share: given as they are; given while the next one is computed; kept."""
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FormAction:
    """A form: the route that it calls, and how its fields become the body."""

    route: str
    body: Callable[[Mapping[str, str]], Any] | None = None


def _reason(form: Mapping[str, str]) -> str:
    if not form.get("reason"):
        raise InvalidInput("a reason is missing", hint="say in the form why")
    return form["reason"]


def _checked(kind: Any, **fields: Any) -> Any:
    """Return a body with the bounds that the route's own decoder would check."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as e:
        raise InvalidInput(f"the form cannot be used: {e}") from e


def _note(form: Mapping[str, str]) -> DecisionNote:
    note: DecisionNote = _checked(DecisionNote, note=_reason(form))
    return note


def _of_machine(kind: Any, form: Mapping[str, str]) -> Any:
    return _checked(kind, machines=[form.get("machine", "")], reason=_reason(form))


ACTIONS: tuple[FormAction, ...] = (
    FormAction("pause_job"),
    FormAction("resume_job"),
    FormAction("rollback_job"),
    FormAction("approve_request", _note),
    FormAction("deny_request", _note),
    FormAction("drain_machines", partial(_of_machine, Drain)),
    FormAction(
        "undrain_machines", lambda form: _checked(Undrain, machines=[form.get("machine", "")])
    ),
    FormAction("confirm_down", partial(_of_machine, ConfirmDown)),
    FormAction("pause_rebalance", lambda form: _checked(PauseWish, reason=_reason(form))),
    FormAction("resume_rebalance"),
)


class Handlers(Protocol):
    """What the console needs of the front end."""

    handlers: dict[str, Handler]
    """By route, behind the guard and the audit log."""

    def authorize(self, request: web.Request, route: Route) -> Peer:
        """Return the caller, or raise if the route's rule refuses them."""
        ...


class Console:
    """The pages over the handlers of one front end."""

    def __init__(
        self,
        front_end: Handlers,
        routes: Iterable[Route],
        revision: Callable[[], int],
        *,
        writes: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`revision` rises with each stored change; without `writes` there are no forms."""
        self._front_end, self._routes = front_end, {route.name: route for route in routes}
        self._revision, self._writes, self._clock = revision, writes, clock
        self._key = secrets.token_bytes(32)
        self._shared = SharedAnswers()
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader,
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters["ago"] = _ago
        self._templates.filters["stamp"] = _stamp
        self._templates.filters["size"] = about_size
        self._templates.filters["number"] = lambda value: f"{value:,}".replace(",", " ")

    def add_to(self, app: web.Application) -> None:
        """Add every page, the files and the stream."""
        for page in PAGES:
            app.router.add_get(page.path, partial(self._answer, page))
        for action in ACTIONS if self._writes else ():
            app.router.add_post(f"/ui/do/{action.route}", partial(self._act, action))
        app.router.add_get("/ui/changes", self._changes)
        app.router.add_get("/ui/jobs/{job}/tasks/{index}/log-stream", self._log_stream)
        for name, kind in _FILES.items():
            app.router.add_get(f"/ui/static/{name}", partial(_file, name, kind))
        app.router.add_get("/ui", _to_start)

    # -- pages

    async def _answer(self, page: Page, request: web.Request) -> web.StreamResponse:
        try:
            peer = self._peer(request, page.path)
            values = await self._values(page, request)
        except TwineError as e:
            return await self._failed(request, e)
        if request.query.get("format") == "json":
            data = {k: v for k, v in values.items() if not callable(v)}
            body = msgspec.json.encode(data, enc_hook=str)
            return web.Response(body=body, content_type="application/json", headers=_HEADERS)
        return self._page(page.template, request, peer, values)

    async def _values(self, page: Page, request: web.Request) -> dict[str, Any]:
        allowed = {"format", *page.parameters}
        if unknown := set(request.query) - allowed:
            raise InvalidInput(
                f"this page takes no parameter {', '.join(sorted(unknown))}",
                hint=f"it takes {', '.join(sorted(allowed))}",
            )
        api = _Routes(self._front_end, self._routes, request)
        asked = PageRequest(api, dict(request.match_info), dict(request.query), self._clock())

        async def load() -> dict[str, Any]:
            revision = self._revision()
            return {"now": asked.now, "revision": revision, **await page.load(asked)}

        if not page.is_shared:
            return await load()
        key = f"{page.path}?{sorted((k, v) for k, v in asked.query.items() if k != 'format')}"
        return await self._shared.get(key, load)

    def _page(
        self,
        template: str,
        request: web.Request,
        peer: Peer,
        values: Mapping[str, Any],
        status: int = 200,
    ) -> web.Response:
        text = self._templates.get_template(template).render(
            here=request.path,
            may=partial(self._may, request),
            token=self._token(peer),
            **values,
        )
        response = web.Response(
            text=text, status=status, content_type="text/html", headers=_HEADERS
        )
        response.enable_compression()
        return response

    def _may(self, request: web.Request, route: str) -> bool:
        """Return whether the caller is shown a form: the API decides again when it is sent."""
        try:
            self._front_end.authorize(request, self._routes[route])
        except TwineError:
            return False
        return self._writes

    async def _failed(self, request: web.Request, error: TwineError) -> web.Response:
        problem = msgspec.structs.replace(error.problem(), request_id=request_id())
        if request.query.get("format") == "json":
            body, kind = msgspec.json.encode(problem), "application/problem+json"
            return web.Response(
                body=body, status=problem.status, content_type=kind, headers=_HEADERS
            )
        values = {"problem": problem, "now": self._clock(), "revision": 0}
        return self._page("problem.html", request, Peer("", ""), values, problem.status)

    def _peer(self, request: web.Request, path: str) -> Peer:
        return self._front_end.authorize(request, Route("ui", "GET", path, needs=Needs.VIEWER))

    # -- changes

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        try:
            self._peer(request, "/ui/changes")
        except TwineError as e:
            return await self._failed(request, e)
        return await self._streamed(request, lambda to: send_changes(to, self._revision))

    async def _log_stream(self, request: web.Request) -> web.StreamResponse:
        api = _Routes(self._front_end, self._routes, request)
        path = dict(request.match_info)
        try:
            chunks = await api.get("job_logs", path, follow="true", tail="0")
        except TwineError as e:
            return await self._failed(request, e)
        async with contextlib.aclosing(chunks):
            return await self._streamed(request, lambda to: send_log(to, chunks))

    async def _streamed(
        self, request: web.Request, send: Callable[[web.StreamResponse], Awaitable[None]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        # The browser left, or opens another stream: also where the task is gone meanwhile.
        with contextlib.suppress(ConnectionError, TimeoutError, TwineError):
            await send(response)
        return response

    # -- forms

    def _token(self, peer: Peer) -> str:
        return hmac.new(self._key, peer.name.encode(), hashlib.sha256).hexdigest()

    async def _act(self, action: FormAction, request: web.Request) -> web.StreamResponse:
        """Carry out a form: the same route, with the same rights, as twinectl calls."""
        try:
            route = self._routes[action.route]
            peer = self._front_end.authorize(request, route)
            form = await _form(request)
            token = form.pop("token", "").encode()
            if not hmac.compare_digest(token, self._token(peer).encode()):
                raise Forbidden("the form is not of a page of this console", hint="load it again")
            back = form.pop("back", "/ui/")
            path = {name: form.pop(name, "") for name in route.parameters}
            body = action.body(form) if action.body else None
            call = Call(route, peer, body, path, {}, None, request_id())
            await self._front_end.handlers[action.route](call)
        except TwineError as e:
            return await self._failed(request, e)
        if not back.startswith("/ui/"):
            back = "/ui/"
        return _redirect(back, 303)


class SharedAnswers:
    """Answers that all viewers share: a page over a whole region is computed once, not per browser.

    An answer that is older than `FRESH_S` is still given while the next one is computed, up to
    `STALE_S`: the page says its age ("as of"), and a viewer never waits for 50,000 machines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._answers: dict[str, tuple[float, Answer]] = {}
        self._loading: dict[str, asyncio.Task[Answer]] = {}

    async def get(self, key: str, load: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return an answer at most `STALE_S` old; raises what `load` raises."""
        at, answer = self._answers.get(key, (-STALE_S, {}))
        age = self._clock() - at
        if answer and age < FRESH_S:
            return answer
        if key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load(key, load))
            self._loading[key].add_done_callback(lambda task: self._loaded(key, task))
        if answer and age < STALE_S:
            return answer
        return await asyncio.shield(self._loading[key])

    async def _load(self, key: str, load: Callable[[], Awaitable[Answer]]) -> Answer:
        began = self._clock()
        answer = await load()
        self._answers.pop(key, None)
        self._answers[key] = began, answer
        while len(self._answers) > SHARED_MAX:
            del self._answers[next(iter(self._answers))]  # the one that was computed first
        return answer

    def _loaded(self, key: str, task: asyncio.Task[Answer]) -> None:
        self._loading.pop(key, None)
        if not task.cancelled():
            task.exception()  # its waiters raise it; without any it is not an error of the loop


class _Routes:
    """Calls the front end's handlers as the caller of a request."""

    def __init__(
        self,
        front_end: Handlers,
        routes: Mapping[str, Route],
        request: web.Request,
    ) -> None:
        self._front_end, self._routes, self._request = front_end, routes, request

    async def get(self, route: str, path: Mapping[str, str] = {}, /, **query: str) -> Any:
        row = self._routes[route]
        peer = self._front_end.authorize(self._request, row)
        given = {name: value for name, value in query.items() if value}
        return await self._front_end.handlers[route](
            Call(row, peer, None, path, given, None, request_id())
        )

    async def read(self, route: str, path: Mapping[str, str], most: int, /, **query: str) -> bytes:
        kept = b""
        async with contextlib.aclosing(await self.get(route, path, **query)) as chunks:
            async for chunk in chunks:
                kept = (kept + chunk)[-most:]
        return kept


async def _form(request: web.Request) -> dict[str, str]:
    if request.content_type != "application/x-www-form-urlencoded":
        raise InvalidInput("a form is application/x-www-form-urlencoded")
    if (request.content_length or 0) > FORM_MAX:
        raise InvalidInput(f"a form has at most {FORM_MAX} bytes")
    fields = await request.post()
    return {name: value for name, value in fields.items() if isinstance(value, str)}


async def _file(name: str, kind: str, _: web.Request) -> web.Response:
    text = await asyncio.to_thread((_HERE / "static" / name).read_text)
    headers = _HEADERS | {"Cache-Control": "max-age=300"}
    return web.Response(text=text, content_type=kind, headers=headers)


async def _to_start(_: web.Request) -> web.Response:
    return _redirect("/ui/", 302)


def _redirect(path: str, status: int) -> web.Response:
    # A raised redirect would become a problem document.
    return web.Response(status=status, headers=_HEADERS | {"Location": path})


def _ago(at: float, now: float) -> str:
    """Return a time as people say it: `3 min ago`."""
    seconds = max(0.0, now - at)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
