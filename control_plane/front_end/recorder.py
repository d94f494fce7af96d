"""Records every change and every refused change in the audit log; wraps the handlers.

The recorded fields of a request are an explicit list, because other fields may hold secrets: for
example the environment of a task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from control_plane.api.people import OBJECT_KINDS, AuditEntry, Outcome
from control_plane.front_end.access import Access
from control_plane.front_end.trail import Trail
from wire.errors import Forbidden, TwineError, Unauthenticated
from wire.fairness import Peer
from wire.peers import principal
from wire.routes import Route
from wire.server import Call, Handler, NextHandler, request_id

_ATOMIC = frozenset(("put_size",))
"""Routes whose change is one transaction; their handlers store `Call.also` in it."""
_RECORDED = (
    *("entitlement", "tasks", "image", "machines", "rru", "per_type", "owners", "members"),
    *("kind", "reason", "note", "donor", "borrower", "scope", "queue", "priority", "controller"),
    *("work", "wave_size", "within", "despite", "without", "for_s", "step", "force"),
    *("relaxations", "share", "minimum", "maximum", "lasts_s", "machine_type", "runtime"),
    *("expect", "take_over", "traffic"),
)
"""Fields of a request that the audit log contains; none of them may hold a secret."""


RevisionOf = Callable[[str, str], int | None]
"""Returns the revision of a stored record, by kind and name; None if that kind has none."""


class Recorder:
    """Runs between the guard and the handlers of all routes that change something."""

    def __init__(
        self,
        trail: Trail,
        revision_of: RevisionOf,
        routes: Sequence[Route],
        is_local: Callable[[Call], bool] = lambda _: True,
    ) -> None:
        """`is_local` returns whether this process, and not that of a shard, makes the change."""
        self._is_local = is_local
        self._trail = trail
        self._revision_of = revision_of
        self._routes = {(r.method, r.path): r for r in routes}
        self._begun: set[str] = set()
        """Ids of requests that have an entry, which also records their refusal."""

    async def carry_out(self, call: Call, handler: Handler) -> Any:
        """Write an entry, make the change, and complete the entry with the outcome."""
        entry = _entry(call.peer, call.route, call.request_id, call.path, call.body)
        if call.route.duplex:  # its whole request is in the parameters
            detail = f"task {call.path.get('index', '')}: {call.query.get('command', '')}"
            entry = replace(entry, detail=detail)
        kind, _, name = entry.object.partition("/")
        before = self._revision_of(kind, name)
        self._begun.add(call.request_id)
        if call.peer.role == "anyone":
            return await self._record_afterwards(replace(entry, before=before), call, handler)
        if call.route.name in _ATOMIC and self._is_local(call):
            return await self._record_atomically(replace(entry, before=before), call, handler)
        entry = await self._trail.begin(replace(entry, before=before))
        result = await _record_failure(handler(call), entry, self._trail.end)
        after = self._revision_of(kind, name)
        done = replace(entry, outcome=Outcome.DONE, after=after, also=_changed_machines(result))
        await self._trail.end(done)
        return result

    async def _record_atomically(self, entry: AuditEntry, call: Call, handler: Handler) -> Any:
        """Make a change and its entry in one transaction; if it fails, write only the entry."""
        done = replace(entry, outcome=Outcome.DONE)
        entry, operations = self._trail.prepare(done)
        return await _record_failure(handler(call.storing(operations)), entry, self._trail.failed)

    async def _record_afterwards(self, entry: AuditEntry, call: Call, handler: Handler) -> Any:
        """Make the change of an unknown caller: a host that joins.

        Its entry is written after the change, so that callers without a credential cannot fill the
        log; refused attempts are bounded like all refusals.
        """
        try:
            result = await handler(call)
        except TwineError as e:
            await self._trail.refused(_failed(entry, e))
            raise
        await self._trail.begin(replace(entry, outcome=Outcome.DONE))
        return result

    def refusals(self, access: Access) -> Any:
        """Return the middleware that records refused changes with their callers."""

        @web.middleware
        async def record_refusals(request: web.Request, handler: NextHandler) -> web.StreamResponse:
            try:
                return await handler(request)
            except (Forbidden, Unauthenticated) as e:
                resource = request.match_info.route.resource
                route = self._routes.get((request.method, resource.canonical if resource else ""))
                if route is not None:
                    await self.note_refusal(request, access, route, request.match_info, e)
                raise
            finally:
                self._begun.discard(request_id())

        return record_refusals

    async def note_refusal(
        self,
        request: web.Request,
        access: Access,
        route: Route,
        path: Mapping[str, str],
        error: TwineError,
    ) -> None:
        """Record that a change was refused, unless its entry already has the outcome."""
        if not route.is_change or request_id() in self._begun:
            return
        try:
            peer = access.identify(request)
        except (Forbidden, Unauthenticated):
            peer = Peer(name="anyone", role="anyone", address=request.remote or "")
        entry = _entry(peer, route, request_id(), path)
        await self._trail.refused(replace(entry, outcome=Outcome.REFUSED, reason=str(error)))


async def _record_failure(
    change: Awaitable[Any], entry: AuditEntry, write: Callable[[AuditEntry], Awaitable[None]]
) -> Any:
    """Return the result of a change; if it fails, write its entry with the reason."""
    try:
        return await change
    except TwineError as e:
        await write(_failed(entry, e))
        raise
    except Exception:
        reason = "a bug; the log has more"
        await write(replace(entry, outcome=Outcome.FAILED, reason=reason))
        raise


def _failed(entry: AuditEntry, error: TwineError) -> AuditEntry:
    outcome = Outcome.REFUSED if isinstance(error, Forbidden) else Outcome.FAILED
    return replace(entry, outcome=outcome, reason=str(error))


def caller_of(peer: Peer) -> str:
    """Return the name of a caller in the audit log, such as `user:ann` or `local:0`."""
    named = peer.role in ("user", "host", "component")
    return f"{peer.role}:{principal(peer)}" if named else peer.name


def _entry(
    peer: Peer, route: Route, request: str, path: Mapping[str, str], body: Any = None
) -> AuditEntry:
    return AuditEntry(
        sequence=0,
        at=0.0,
        caller=caller_of(peer),
        address=peer.address,
        request_id=request,
        action=route.name,
        object=_object(route, path, body),
        detail=_detail(body),
    )


def _object(route: Route, path: Mapping[str, str], body: Any) -> str:
    for parameter, kind in OBJECT_KINDS.items():
        if parameter in path:
            return f"{kind}/{path[parameter]}"
    machine = getattr(body, "machine", None)
    if isinstance(machine, str):
        return f"machine/{machine}"
    return route.path.removeprefix("/v1/")


def _changed_machines(result: Any) -> list[str]:
    """Return the machines that an answer lists."""
    machines = getattr(result, "machines", None)
    if not isinstance(machines, list):
        return []
    names = [m if isinstance(m, str) else getattr(m, "machine", "") for m in machines[:100]]
    return [f"machine/{name}" for name in names if name]


def _detail(body: Any) -> str:
    """Return the recordable fields of a request as short text."""
    if not isinstance(body, msgspec.Struct):
        return ""
    recorded: dict[str, Any] = {}
    for part in (body, getattr(body, "spec", None)):
        kind: Any = type(part)
        for name in _recorded_fields(kind):
            value = getattr(part, name)
            if value not in (None, "", [], {}, False):
                recorded[name] = _shortened(value)
    return ", ".join(f"{name}={value}" for name, value in recorded.items())


@cache
def _recorded_fields(kind: type) -> tuple[str, ...]:
    """Return the recordable fields of a type."""
    return tuple(name for name in _RECORDED if hasattr(kind, name))


def _shortened(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        plain = msgspec.to_builtins(value)
        return "/".join(f"{k}:{v}" for k, v in plain.items() if v is not None)
    return " ".join(map(str, value)) if isinstance(value, list) else value
