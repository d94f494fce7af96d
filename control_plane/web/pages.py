"""A row for each page: its path, its template, and which answers it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from control_plane.api.machines import MachineView
from control_plane.web.core.gantt import chart
from control_plane.web.core.region import COLOURS, grid, open_events, state_of
from control_plane.web.core.spans import setting_bars, wave_bars
from wire.errors import InvalidInput

MACHINES_A_CALL = 500
"""About 5 ms of computing; other requests have their turn between two calls."""
EVENTS_A_PAGE = 1000
PROFILES_A_PAGE = 200
LINES, LOG_MAX = ("200", "1000", "5000"), 2 << 20
"""Lines of a log that a page may show, and bytes of them that it reads at most."""
WINDOWS = {
    **{"15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 86_400, "7d": 7 * 86_400},
    "all": 0,
}
"""Span of a chart → seconds; the first is what a page opens with, 0 is all that is known."""


class Api(Protocol):
    """The routes of the front end, called with the rights of the one who opened the page."""

    async def get(self, route: str, path: Mapping[str, str] = {}, /, **query: str) -> Any:
        """Return the answer of a route; raises what the route raises."""
        ...

    async def read(self, route: str, path: Mapping[str, str], most: int, /, **query: str) -> bytes:
        """Return the last `most` bytes of a route that streams; raises what the route raises."""
        ...


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What a page was opened with."""

    api: Api
    path: Mapping[str, str]
    query: Mapping[str, str]
    now: float

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return a parameter that has one of some values; the first is the default."""
        value = self.query.get(name) or allowed[0]
        if value not in allowed:
            raise InvalidInput(f"parameter {name} is one of {', '.join(allowed)}, not {value!r}")
        return value

    def number(self, name: str) -> int:
        """Return a parameter that is a whole number from 0 to a million; 0 if it is absent."""
        text = self.query.get(name) or "0"
        if not text.isascii() or not text.isdecimal() or int(text[:8]) > 1_000_000:
            raise InvalidInput(f"parameter {name} is a number from 0 to 1000000, not {text[:20]!r}")
        return int(text)


Load = Callable[[PageRequest], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page; `parameters` are those of its query besides `format`.

    The answer of a shared page is computed once for all viewers (`serving.SharedAnswers`).
    """

    path: str
    template: str
    load: Load
    parameters: tuple[str, ...] = field(default=())
    is_shared: bool = False


async def _machines(api: Api, **scope: str) -> list[MachineView]:
    found: list[MachineView] = []
    after = ""
    while True:
        page = await api.get("list_machines", limit=str(MACHINES_A_CALL), after=after, **scope)
        found += page.machines
        after = page.next
        if not after:
            return found
        await asyncio.sleep(0)  # let other requests in between two pages


async def _region(request: PageRequest) -> dict[str, Any]:
    api, colour = request.api, request.one_of("colour", COLOURS)
    views = await _machines(api)
    return {
        "grid": await asyncio.to_thread(grid, views, colour),
        "colour": colour,
        "colours": COLOURS,
        "held_back": (await api.get("held_back_machines")).machines,
        "limits": [limit for limit in (await api.get("list_limits")).limits if limit.held],
        "events": [(view.record.machine, e) for view in views for e in open_events(view)][:50],
        "capacity": await api.get("get_capacity"),
    }


async def _jobs(request: PageRequest) -> dict[str, Any]:
    text = request.query.get("search", "")
    jobs = (await request.api.get("list_jobs")).jobs
    found = [job for job in jobs if text in job.record.name or text in job.record.spec.entitlement]
    order = request.one_of("sort", ("name", "health", "entitlement", "tasks"))
    keys: dict[str, Callable[[Any], Any]] = {
        "name": lambda job: job.record.name,
        "health": lambda job: (job.healthy / max(1, job.wanted), job.record.name),
        "entitlement": lambda job: (job.record.spec.entitlement, job.record.name),
        "tasks": lambda job: (-job.wanted, job.record.name),
    }
    return {"jobs": sorted(found, key=keys[order]), "search": text, "sort": order, "all": len(jobs)}


async def _job(request: PageRequest) -> dict[str, Any]:
    api, path = request.api, {"job": request.path["job"]}
    status = await api.get("get_job", path)
    events = await _latest_events(api, path)
    span = request.one_of("window", tuple(WINDOWS))
    shift = request.number("back")
    end = request.now - shift * WINDOWS[span]
    first = request.number("row")
    known = min((event.start or event.end for event in events), default=end)
    window = (end - WINDOWS[span] if WINDOWS[span] else min(known, end - 1), end)
    return {
        "job": status,
        "explanation": await api.get("explain_job", path),
        "intents": await api.get("get_intents", path),
        "chart": chart(events, status.record.tasks, window, first),
        "events": list(reversed(events))[:100],
        "tasks": status.record.tasks[first : first + 500],
        "window": span,
        "windows": tuple(WINDOWS),
        "back": shift,
        "row": first,
    }


async def _latest_events(api: Api, path: Mapping[str, str]) -> list[Any]:
    """Return the kept events of a job, oldest first; the log itself is bounded."""
    found: list[Any] = []
    while True:
        after = str(found[-1].seq if found else 0)
        page = await api.get("job_events", path, after=after, limit=str(EVENTS_A_PAGE))
        found += page.events
        if not page.more or not page.events:
            return found


async def _task(request: PageRequest) -> dict[str, Any]:
    path = {"job": request.path["job"], "index": request.path["index"]}
    status = await request.api.get("get_job", {"job": path["job"]})
    story = await request.api.get("task_story", path)
    tasks = [task for task in status.record.tasks if str(task.index) == path["index"]]
    return {"job": status, "story": story, "task": tasks[0] if tasks else None}


async def _logs(request: PageRequest) -> dict[str, Any]:
    path = {"job": request.path["job"], "index": request.path["index"]}
    lines = request.one_of("lines", LINES)
    previous = request.one_of("run", ("this", "previous")) == "previous"
    query = {"tail": lines, "previous": "true" if previous else ""}
    log = await request.api.read("job_logs", path, LOG_MAX, **query)
    return {
        **path,
        "log": log.decode(errors="replace"),
        "lines": lines,
        "choices": LINES,
        "previous": previous,
    }


async def _machine_list(request: PageRequest) -> dict[str, Any]:
    names = ("datacenter", "msb", "rack", "entitlement", "state")
    scope = {name: request.query[name] for name in names if request.query.get(name)}
    after = request.query.get("after", "")
    page = await request.api.get("list_machines", limit="200", after=after, **scope)
    return {"machines": page.machines, "next": page.next, "scope": scope, "state_of": state_of}


async def _machine(request: PageRequest) -> dict[str, Any]:
    view = await request.api.get("get_machine", {"machine": request.path["machine"]})
    return {"view": view, "state": state_of(view), "open": open_events(view)}


async def _entitlements(request: PageRequest) -> dict[str, Any]:
    api = request.api
    return {
        "entitlements": (await api.get("list_entitlements")).entitlements,
        "requests": (await api.get("list_requests")).requests,
        "capacity": await api.get("get_capacity"),
    }


async def _profiles(request: PageRequest) -> dict[str, Any]:
    api = request.api
    names = [view.record.name for view in (await api.get("list_entitlements")).entitlements]
    shown = names[:PROFILES_A_PAGE]
    views = [await api.get("get_profile_rollout", {"entitlement": name}) for name in shown]
    stats = await api.get("profile_stats")
    return {
        "profiles": views,
        "hidden": len(names) - len(shown),
        "stats": stats,
        "bars": setting_bars(stats.settings),
    }


async def _maintenance(request: PageRequest) -> dict[str, Any]:
    plans = (await request.api.get("list_plans")).plans
    return {"plans": [(view, wave_bars(view.waves, request.now)) for view in plans]}


async def _rebalance(request: PageRequest) -> dict[str, Any]:
    return {
        "status": await request.api.get("rebalance_status"),
        "history": (await request.api.get("rebalance_history")).moves[:200],
    }


async def _shards(request: PageRequest) -> dict[str, Any]:
    return {"loads": await request.api.get("list_shards")}


async def _audit(request: PageRequest) -> dict[str, Any]:
    before = str(request.number("before") or "")
    page = await request.api.get("list_audit", before=before, limit="200")
    return {"entries": page.entries, "next": page.next}


async def _myself(request: PageRequest) -> dict[str, Any]:
    return {"me": await request.api.get("get_myself")}


PAGES: tuple[Page, ...] = (
    Page("/ui/", "region.html", _region, ("colour",), is_shared=True),
    Page("/ui/jobs", "jobs.html", _jobs, ("search", "sort")),
    Page("/ui/jobs/{job}", "job.html", _job, ("window", "back", "row")),
    Page("/ui/jobs/{job}/tasks/{index}", "task.html", _task),
    Page("/ui/jobs/{job}/tasks/{index}/logs", "logs.html", _logs, ("lines", "run")),
    Page(
        "/ui/machines",
        "machines.html",
        _machine_list,
        ("datacenter", "msb", "rack", "entitlement", "state", "after"),
    ),
    Page("/ui/machines/{machine}", "machine.html", _machine),
    Page("/ui/entitlements", "entitlements.html", _entitlements),
    Page("/ui/profiles", "profiles.html", _profiles),
    Page("/ui/maintenance", "maintenance.html", _maintenance),
    Page("/ui/rebalance", "rebalance.html", _rebalance),
    Page("/ui/shards", "shards.html", _shards),
    Page("/ui/audit", "audit.html", _audit, ("before",)),
    Page("/ui/myself", "myself.html", _myself),
)
