"""The pages of the console: the path and template of each, and the API answers that it shows."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from control_plane.api.capacity import RequestState
from control_plane.api.jobs import JobPhase, JobStatus, task_id
from control_plane.api.people import Needs, Role
from control_plane.api.routes import ROUTES
from control_plane.api.tasks import HostDescription
from control_plane.broker.core.region_map import CELLS_MAX, MAP_FACTS, open_events, state_of
from control_plane.web.calls import RouteCalls
from control_plane.web.core.gantt import chart, pack
from control_plane.web.core.region import grid, power_bars, split_bar
from control_plane.web.core.spans import setting_chart, wave_chart
from control_plane.web.core.usage import about_size_of, usage_charts
from control_plane.web.core.versions import changes, choose_versions, versions_of
from control_plane.web.forms import ACTIONS
from control_plane.web.page_request import Page, PageRequest
from control_plane.web.service_pages import SERVICE_PAGES
from wire.errors import InvalidInput, TwineError
from wire.openapi import QUERY_MAX

EVENTS_A_PAGE = 1000
PROFILES_A_PAGE, PLANS_A_PAGE = 200, 20
ROWS_A_PAGE, TASKS_A_PAGE = 200, 200
HOST_S = 2.0
"""Seconds that a page waits for the agent of a machine; then it is shown without the answer."""
WATCH_S = 5
"""Seconds after which a page about one machine is loaded again, because its usage is not stored."""
LINES, LOG_MAX = ("200", "1000", "5000"), 2 << 20
"""Lines of a log that a page may show, and the most bytes that it reads."""
_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
"""Escape sequences by which terminals change colour."""
WINDOWS = {
    **{"15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 86_400, "7d": 7 * 86_400},
    "all": 0,
}
"""Span of a chart → seconds; the first is the default, 0 means all known events."""
TIME_MAX = 32_503_680_000
"""The year 3000, in seconds since 1970."""


async def _region(request: PageRequest) -> dict[str, Any]:
    api, colour = request.api, request.one_of("colour", MAP_FACTS)
    region_map = await api.get("map_region", by=colour)
    capacity = await request.shared.get_if_quick(
        "capacity", api.prepare("get_capacity"), is_long=region_map.machines > CELLS_MAX
    )
    requests = (await api.get("list_requests")).requests
    return {
        "status": await api.get("region_status"),
        "pending": sum(one.state == RequestState.PENDING for one in requests),
        "grid": await asyncio.to_thread(grid, region_map),
        "colour": colour,
        "colours": MAP_FACTS,
        "held_back": (await api.get("held_back_machines")).machines,
        "limits": [limit for limit in (await api.get("list_limits")).limits if limit.held],
        "events": region_map.events,
        "open_events": region_map.open_events,
        "capacity": capacity,
        "parts": split_bar(capacity) if capacity is not None else [],
        "power": power_bars(capacity) if capacity is not None else [],
        "every": 0 if capacity is not None else WATCH_S,
    }


_JOB_ORDERS: dict[str, Callable[[JobStatus], Any]] = {
    "name": lambda job: job.record.name,
    "health": lambda job: (job.healthy / max(1, job.wanted), job.record.name),
    "entitlement": lambda job: (job.record.spec.entitlement, job.record.name),
    "tasks": lambda job: (-job.wanted, job.record.name),
    "phase": lambda job: (job.phase, job.record.name),
}
SHOWN_JOBS = ("all", "not healthy", *(phase.value for phase in JobPhase))


def _lacks_health(job: JobStatus) -> bool:
    return job.healthy < job.wanted


def _is_shown(job: JobStatus, only: str) -> bool:
    if only == "not healthy":
        return _lacks_health(job)
    return only == "all" or job.phase == only


async def _jobs(request: PageRequest) -> dict[str, Any]:
    text, only = request.query.get("search", ""), request.one_of("only", SHOWN_JOBS)
    order, first = request.one_of("sort", tuple(_JOB_ORDERS)), request.number("first")
    owner = request.query.get("entitlement", "")
    jobs = (await request.shared.get("jobs", lambda: request.api.get("list_jobs"))).jobs

    def select() -> tuple[list[JobStatus], Counter[str]]:
        """Return the jobs to show in their order, and counts by phase of those with the name."""
        named = [
            job
            for job in jobs
            if text in job.record.name and (not owner or job.record.spec.entitlement == owner)
        ]
        counts = Counter(job.phase.value for job in named)
        counts["all"], counts["not healthy"] = len(named), sum(map(_lacks_health, named))
        shown = (job for job in named if _is_shown(job, only))
        return sorted(shown, key=_JOB_ORDERS[order]), counts

    matching, counts = await asyncio.to_thread(select)
    return {
        "counts": counts,
        "jobs": matching[first : first + ROWS_A_PAGE],
        "suitable": len(matching),
        "all": len(jobs),
        "first": first,
        "rows": ROWS_A_PAGE,
        "search": text,
        "entitlement": owner,
        "sort": order,
        "sorts": tuple(_JOB_ORDERS),
        "only": only,
        "onlys": SHOWN_JOBS,
    }


async def _operations(request: PageRequest, status: JobStatus) -> dict[str, Any]:
    """Return the chart of a job's operations, and the events behind it."""
    events = await _latest_events(request.api, {"job": status.record.name})
    span, shift = request.one_of("window", tuple(WINDOWS)), request.number("back")
    end = request.now - shift * WINDOWS[span]
    known = min((event.start or event.end for event in events), default=end)
    window = (end - WINDOWS[span] if WINDOWS[span] else min(known, end - 1), end)
    begin, until = request.number("begin", TIME_MAX), request.number("end", TIME_MAX)
    is_zoomed = bool(begin or until)
    if is_zoomed and begin >= until:
        raise InvalidInput(f"parameter begin is a time before end, not {begin} and {until}")
    if is_zoomed:
        window = (float(begin), float(until))
    first, tasks = request.number("row"), status.record.tasks
    drawn = await asyncio.to_thread(chart, events, tasks, window, first)
    found = {
        "chart": drawn,
        "events": events,
        "window": span,
        "windows": tuple(WINDOWS),
        "back": shift,
        "zoomed": is_zoomed,
        "row": first,
    }
    if request.as_data:
        found["packed"] = await asyncio.to_thread(pack, events, tasks, window)
    return found


async def _job(request: PageRequest) -> dict[str, Any]:
    api, path = request.api, {"job": request.path["job"]}
    status = await api.get("get_job", path)
    found = await _operations(request, status)
    first, known = request.number("task"), versions_of(status.record)
    old, new = choose_versions(known, request.number("old"), request.number("new"))
    return found | {
        "job": status,
        "explanation": await api.get("explain_job", path),
        "intents": await api.get("get_intents", path),
        "events": found["events"][::-1][:100],
        "tasks": status.record.tasks[first : first + TASKS_A_PAGE],
        "first_task": first,
        "rows": TASKS_A_PAGE,
        "versions": list(known),
        "old": old,
        "new": new,
        "changes": changes(known[old], known[new]) if old else [],
    }


async def _operations_page(request: PageRequest) -> dict[str, Any]:
    status = await request.api.get("get_job", {"job": request.path["job"]})
    found = await _operations(request, status)
    del found["events"]
    return found | {"name": status.record.name}


async def _latest_events(api: RouteCalls, path: Mapping[str, str]) -> list[Any]:
    """Return the kept events of a job, oldest first; the log itself is bounded."""
    found: list[Any] = []
    while True:
        after = str(found[-1].seq if found else 0)
        page = await api.get("job_events", path, after=after, limit=str(EVENTS_A_PAGE))
        found += page.events
        if not page.more or not page.events:
            return found


async def _ask_agent(request: PageRequest, machine: str) -> tuple[HostDescription | None, str]:
    """Return the present answer of a machine's agent, or why there is none."""
    path = {"machine": machine}
    try:
        async with asyncio.timeout(HOST_S):
            host: HostDescription = await request.shared.get(
                f"host {machine}", lambda: request.api.get("describe_host", path)
            )
    except TimeoutError:
        return None, f"the agent of {machine} did not answer within {HOST_S:g} s"
    except TwineError as e:
        return None, str(e)
    request.history.add(machine, request.now, host.usage)
    return host, ""


async def _task(request: PageRequest) -> dict[str, Any]:
    path = {"job": request.path["job"], "index": request.path["index"]}
    status = await request.api.get("get_job", {"job": path["job"]})
    story = await request.api.get("task_story", path)
    tasks = [task for task in status.record.tasks if task.index == story.task]
    name, host, silent = task_id(path["job"], story.task), None, ""
    if story.machine:
        host, silent = await _ask_agent(request, story.machine)
    used = [one for one in host.usage.tasks if one.task_id == name] if host is not None else []
    return {
        "job": status,
        "story": story,
        "task": tasks[0] if tasks else None,
        "usage": used[0] if used else None,
        "charts": usage_charts(request.history.points(story.machine, name), about_size_of),
        "silent": silent,
        "every": WATCH_S,
    }


async def _logs(request: PageRequest) -> dict[str, Any]:
    path = {"job": request.path["job"], "index": request.path["index"]}
    lines = request.one_of("lines", LINES)
    previous = request.one_of("run", ("this", "previous")) == "previous"
    query = {"tail": lines, "previous": "true" if previous else ""}
    log = await request.api.read_end("job_logs", path, LOG_MAX, **query)
    return {
        **path,
        "log": _COLOUR.sub("", log.decode(errors="replace")),
        "lines": lines,
        "choices": LINES,
        "previous": previous,
    }


_SCOPE = ("datacenter", "msb", "rack", "machine_type", "entitlement", "state", "unavailable")
_MACHINE_ORDERS = ("name", "entitlement", "profile", "type", "place", "tasks")


async def _machine_list(request: PageRequest) -> dict[str, Any]:
    scope = {name: request.query[name] for name in _SCOPE if request.query.get(name)}
    after, text = request.query.get("after", ""), request.query.get("search", "")
    order = request.one_of("sort", _MACHINE_ORDERS)
    page = await request.api.get(
        "list_machines", limit=str(ROWS_A_PAGE), after=after, search=text, sort=order, **scope
    )
    return {
        "machines": [(v, state_of(v.record, len(v.tasks), v.ready)) for v in page.machines],
        "next": page.next,
        "scope": scope,
        "search": text,
        "sort": order,
        "sorts": _MACHINE_ORDERS,
    }


async def _machine(request: PageRequest) -> dict[str, Any]:
    machine = request.path["machine"]
    view = await request.api.get("get_machine", {"machine": machine})
    host, silent = await _ask_agent(request, machine) if view.record.address else (None, "")
    return {
        "view": view,
        "state": state_of(view.record, len(view.tasks), view.ready),
        "open": open_events(view.record),
        "profile": host.profile if host is not None else None,
        "usage": {one.task_id: one for one in host.usage.tasks} if host is not None else {},
        "charts": usage_charts(request.history.points(machine), about_size_of),
        "silent": silent,
        "every": WATCH_S,
    }


async def _entitlements(request: PageRequest) -> dict[str, Any]:
    api = request.api
    views = (await api.get("list_entitlements")).entitlements
    specs = {view.record.name: view.record.spec for view in views}
    requests = (await api.get("list_requests")).requests
    capacity = await request.shared.get_if_quick("capacity", api.prepare("get_capacity"))
    return {
        "entitlements": views,
        "lines": {line.name: line for line in capacity.entitlements} if capacity else {},
        "requests": [
            (one, changes(specs.get(one.entitlement), one.spec) if one.spec else [])
            for one in requests
        ],
        "capacity": capacity,
        "parts": split_bar(capacity) if capacity is not None else [],
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
        "times": setting_chart(stats.settings),
    }


async def _maintenance(request: PageRequest) -> dict[str, Any]:
    plans = (await request.api.get("list_plans")).plans
    names = [view.plan.name for view in plans[:PLANS_A_PAGE]]
    views = [await request.api.get("get_plan", {"plan": name}) for name in names]
    return {
        "plans": [(view, wave_chart(view.waves, request.now)) for view in views],
        "hidden": len(plans) - len(views),
    }


async def _rebalance(request: PageRequest) -> dict[str, Any]:
    return {
        "status": await request.api.get("rebalance_status"),
        "history": (await request.api.get("rebalance_history")).moves[:200],
    }


async def _shards(request: PageRequest) -> dict[str, Any]:
    return {
        "loads": await request.api.get("list_shards"),
        "processes": (await request.api.get("region_status")).processes,
    }


async def _audit(request: PageRequest) -> dict[str, Any]:
    before = str(request.number("before", QUERY_MAX - 1) or "")
    who, about = request.query.get("who", ""), request.query.get("object", "")
    page = await request.api.get("list_audit", before=before, limit="200", who=who, object=about)
    return {"entries": page.entries, "next": page.next, "who": who, "object": about}


_OWNER_ROUTES = frozenset(route.name for route in ROUTES if route.needs == Needs.OWNER)


async def _current_user(request: PageRequest) -> dict[str, Any]:
    me = await request.api.get("get_current_user")
    owns = bool(me.owns) or me.role is Role.OPERATOR
    return {
        "me": me,
        "sessions": (await request.api.get("list_sessions")).sessions,
        "forms": [(a.route, a.words, owns and a.route in _OWNER_ROUTES) for a in ACTIONS],
    }


_CHART = ("window", "back", "begin", "end", "row")
PAGES: tuple[Page, ...] = (
    Page("/ui/", "region.html", _region, ("colour",), is_shared=True),
    Page("/ui/jobs", "jobs.html", _jobs, ("search", "entitlement", "only", "sort", "first")),
    Page("/ui/jobs/{job}", "job.html", _job, (*_CHART, "task", "old", "new")),
    Page("/ui/jobs/{job}/operations", "operations.html", _operations_page, _CHART),
    Page("/ui/jobs/{job}/tasks/{index}", "task.html", _task),
    Page("/ui/jobs/{job}/tasks/{index}/logs", "logs.html", _logs, ("lines", "run")),
    Page("/ui/machines", "machines.html", _machine_list, (*_SCOPE, "search", "sort", "after")),
    Page("/ui/machines/{machine}", "machine.html", _machine),
    Page("/ui/entitlements", "entitlements.html", _entitlements),
    Page("/ui/profiles", "profiles.html", _profiles),
    Page("/ui/maintenance", "maintenance.html", _maintenance),
    Page("/ui/rebalance", "rebalance.html", _rebalance),
    Page("/ui/shards", "shards.html", _shards),
    Page("/ui/audit", "audit.html", _audit, ("before", "who", "object")),
    Page("/ui/myself", "myself.html", _current_user),
    *SERVICE_PAGES,
)
