"""What the front end counts, and what it reports of machines and tasks when it is asked."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent.wire.routes import Route
from control_plane.api.jobs import Jobs, TaskPhase
from control_plane.api.machines import Machines, MachineState

NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Metrics:
    """One registry per process; labels are bounded: no names of jobs, tasks or machines."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """Declare the metrics."""
        self._names = {(r.method, r.path): r.name for r in routes}
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "twine_requests",
            "Requests answered by the front end.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "twine_request_seconds",
            "Time to answer a request, streams and waiting calls included.",
            ["route"],
            registry=self._registry,
        )
        self._machines = Gauge(
            "twine_machines", "Machines by state.", ["state"], registry=self._registry
        )
        self._tasks = Gauge("twine_tasks", "Tasks by phase.", ["phase"], registry=self._registry)

    @web.middleware
    async def count(self, request: web.Request, handler: NextHandler) -> web.StreamResponse:
        """Count a request by route and status, and measure it."""
        resource = request.match_info.route.resource
        canonical = "" if resource is None else resource.canonical
        name = self._names.get((request.method, canonical), "other")
        with self._seconds.labels(name).time():
            response = await handler(request)
        self._requests.labels(name, response.status).inc()
        return response

    def text(self, machines: Machines, jobs: Jobs) -> bytes:
        """Return everything in Prometheus' text form."""
        states = Tally(m.record.state for m in machines.machines)
        phases = Tally(t.phase for j in jobs.jobs for t in j.record.tasks)
        for state in MachineState:
            self._machines.labels(state.value).set(states[state])
        for phase in TaskPhase:
            self._tasks.labels(phase.value).set(phases[phase])
        return generate_latest(self._registry)
