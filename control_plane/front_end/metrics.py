"""Metrics: the front end's own counts, and the services' counts at each scrape.

A scrape reads counts and iterates over no machines and no jobs, so its time does not depend on the
size of the region.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Sized

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.allocator.transactions import Allocations
from control_plane.api.elastic import ElasticCounts
from control_plane.api.jobs import TaskPhase
from control_plane.api.limits import LimitViews
from control_plane.api.machines import MachineState
from control_plane.api.rebalancing import MoveState
from control_plane.api.region_status import ProcessStatus
from control_plane.health.service import HealthService
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.scheduler.counters import Counters
from wire.process_metrics import of_process
from wire.routes import Route

NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Metrics:
    """One registry per process; labels are bounded: no names of jobs, tasks or machines."""

    def __init__(
        self,
        routes: Sequence[Route],
        allocations: Sequence[Allocations],
        counters: Counters,
        health: HealthService,
        limits: Callable[[], LimitViews],
        quarantined: Sequence[str] = (),
        ending: Callable[[], Sequence[str]] = list,
        duplicates: Sized = (),
        rebalancer: ReBalancer | None = None,
        elastic: Callable[[], ElasticCounts] = ElasticCounts,
        process: Callable[[], ProcessStatus] | None = None,
    ) -> None:
        """Declare the metrics."""
        self._names = {(r.method, r.path): r.name for r in routes}
        self._of_route: dict[str, Histogram] = {}
        self._registry = of_process(CollectorRegistry())
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
        self._registry.register(_CounterMetrics(counters))
        self._registry.register(_HealthMetrics(health))
        self._registry.register(_LimitMetrics(limits))
        Gauge(
            "twine_quarantined_records",
            "Stored records that are unusable and were set aside (check-store).",
            registry=self._registry,
        ).set_function(lambda: len(quarantined))
        Gauge(
            "twine_identities_ending",
            "Hosts whose certificates end within a week without a renewal.",
            registry=self._registry,
        ).set_function(lambda: len(ending()))
        Gauge(
            "twine_duplicate_identities",
            "Machines with a clone, a host with the same identity (twinectl machine duplicates).",
            registry=self._registry,
        ).set_function(lambda: len(duplicates))
        self._registry.register(_AllocatorMetrics(allocations))
        if rebalancer is not None:
            self._registry.register(_RebalanceMetrics(rebalancer))
        self._registry.register(_ElasticMetrics(elastic))
        if process is not None:
            self._registry.register(_RoleMetrics(process))

    @web.middleware
    async def count(self, request: web.Request, handler: NextHandler) -> web.StreamResponse:
        """Count a request by route and status, and measure it."""
        resource = request.match_info.route.resource
        canonical = "" if resource is None else resource.canonical
        name = self._names.get((request.method, canonical), "other")
        seconds = self._of_route.get(name)
        if seconds is None:
            seconds = self._of_route[name] = self._seconds.labels(name)
        with seconds.time():
            response = await handler(request)
        self._requests.labels(name, response.status).inc()
        return response

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


async def one_chunk(text: bytes) -> AsyncIterator[bytes]:
    """Yield a text as the only part of a stream."""
    yield text


class _RoleMetrics(Collector):
    """The role that this process leads and since when, its lag, and the state of the store."""

    def __init__(self, process: Callable[[], ProcessStatus]) -> None:
        self._process = process

    def collect(self) -> Iterator[Metric]:
        of = self._process()
        for name, text, value in (
            ("ready", "Whether the process is ready.", float(of.ok)),
            ("leader_since_seconds", "Start of its leadership; 0: not elected.", of.since or 0.0),
            ("term", "Epoch of its election.", float(of.term)),
            ("lag_revisions", "Revisions of the store that it has not read yet.", float(of.lag)),
            ("machines", "Machines that it follows.", float(of.machines)),
        ):
            family = GaugeMetricFamily(f"twine_role_{name}", text, labels=["role"])
            family.add_metric([of.role], value)
            yield family
        times = Metric("twine_store_write_seconds", "Time of the last 1,000 writes.", "summary")
        times.add_sample(times.name, {"quantile": "0.5"}, of.write_p50_s)
        times.add_sample(times.name, {"quantile": "0.99"}, of.write_p99_s)
        yield times
        yield CounterMetricFamily(
            "twine_store_writes", "Transactions answered by the store.", value=of.writes
        )


class _CounterMetrics(Collector):
    """Machines by state and tasks by phase; absent ones are 0."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        machines = GaugeMetricFamily("twine_machines", "Machines by state.", labels=["state"])
        for state in MachineState:
            machines.add_metric([state.value], self._counters.machines[state])
        yield machines
        everything = sum(self._counters.machines[state] for state in MachineState)
        yield GaugeMetricFamily(
            "twine_fleet_health_ratio",
            "Share of the machines that are up, from 0 to 1; without any it is 1.",
            value=self._counters.machines[MachineState.UP] / everything if everything else 1.0,
        )
        tasks = GaugeMetricFamily("twine_tasks", "Tasks by phase.", labels=["phase"])
        for phase in TaskPhase:
            tasks.add_metric([phase.value], self._counters.tasks[phase])
        yield tasks


class _HealthMetrics(Collector):
    """Machines whose silence has no effect yet; alarm while the number is not 0."""

    def __init__(self, health: HealthService) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "twine_machines_held_back",
            "Silent or returned machines whose state is not decided yet.",
            value=self._health.count(),
        )


class _LimitMetrics(Collector):
    """Operations that limits let pass and hold back; alarm while a limit holds any back."""

    def __init__(self, limits: Callable[[], LimitViews]) -> None:
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "twine_limit_holds", "Whether a limit holds something back.", labels=["limit"]
        )
        lifted = GaugeMetricFamily(
            "twine_limit_lifted", "Whether an operator lifted a limit.", labels=["limit"]
        )
        passed = CounterMetricFamily("twine_limit_passed", "What passed.", labels=["limit"])
        refused = CounterMetricFamily(
            "twine_limit_refused", "Operations that had to wait.", labels=["limit"]
        )
        for view in self._limits().limits:
            held.add_metric([view.name.value], bool(view.reason))
            lifted.add_metric([view.name.value], view.lifted_for_s is not None)
            passed.add_metric([view.name.value], view.passed)
            refused.add_metric([view.name.value], view.refused)
        yield from (held, lifted, passed, refused)


class _RebalanceMetrics(Collector):
    """The results of the last plan, and of moves."""

    def __init__(self, rebalancer: ReBalancer) -> None:
        self._rebalancer = rebalancer

    def collect(self) -> Iterator[Metric]:
        status, counts = self._rebalancer.status(), self._rebalancer.counts
        ended = CounterMetricFamily(
            "twine_rebalance_moves", "Moves of the ReBalancer that ended.", labels=["state"]
        )
        for state in (MoveState.DONE, MoveState.WITHDRAWN, MoveState.FAILED):
            ended.add_metric([state.value], counts[state])
        yield ended
        plan = status.plan
        for name, text, value in (
            ("hot_machines", "Machines that the last plan found hot.", plan and plan.hot_before),
            (
                "gap_ratio",
                "Share of the possible gain that the last plan does not reach.",
                status.gap,
            ),
            ("measured_tasks", "Tasks whose load was reported recently.", status.measured),
            (
                "gap_alarm",
                "Whether three plans in a row missed much of the possible gain.",
                bool(self._rebalancer.alarm()),
            ),
        ):
            yield GaugeMetricFamily(f"twine_rebalance_{name}", text, value=float(value or 0.0))
        used = GaugeMetricFamily(
            "twine_rebalance_used_ratio",
            "Share of an entitlement's machines that the last plan found in use.",
            labels=["entitlement", "dimension"],
        )
        for entitlement, shares in plan.used.items() if plan is not None else ():
            for dimension, share in shares.items():
                used.add_metric([entitlement, dimension], share)
        yield used


class _AllocatorMetrics(Collector):
    """The work of the allocators, and the size of the region (the paper's Figure 12)."""

    def __init__(self, allocations: Sequence[Allocations]) -> None:
        self._all = allocations

    def collect(self) -> Iterator[Metric]:
        counts = [allocations.counts for allocations in self._all]
        indexes = [allocations.index for allocations in self._all]
        answers = CounterMetricFamily(
            "twine_allocations",
            "Allocation requests, by whether the cache had the answer.",
            labels=["cache"],
        )
        answers.add_metric(["hit"], sum(c.hits for c in counts))
        answers.add_metric(["miss"], sum(c.misses for c in counts))
        yield answers
        for name, text, value in (
            (
                "conflicts",
                "Plans that conflicted with an earlier one.",
                sum(c.conflicts for c in counts),
            ),
            ("stored", "Allocations written to the store.", sum(c.stored for c in counts)),
            ("machines_taken", "Machines taken from the free pool.", sum(c.taken for c in counts)),
            (
                "cpu_seconds",
                "Computing time of plans and reservations.",
                sum(c.cpu_s for c in counts),
            ),
        ):
            yield CounterMetricFamily(f"twine_allocator_{name}", text, value=value)
        yield GaugeMetricFamily(
            "twine_allocator_machines", "Machines in the index.", value=len(indexes[0].machines)
        )
        yield GaugeMetricFamily(
            "twine_allocator_jobs",
            "Jobs with claims.",
            value=sum(len(index.claims) for index in indexes),
        )


class _ElasticMetrics(Collector):
    """Loans, and whether their promises are kept; alarm while a machine is late."""

    def __init__(self, counts: Callable[[], ElasticCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, text, value in (
            ("loans", "Machines on loan, with a promise or by hand.", counts.loans),
            ("loans_leaving", "Machines on loan that were recalled.", counts.leaving),
            (
                "loans_late",
                "Machines that are not back after the end of their promise.",
                counts.late,
            ),
            ("owners_short", "Entitlements that wait for their own machines.", counts.short),
            ("borrowers_short", "Entitlements that want more loans.", counts.wanting),
            ("kept_free", "Free machines that are not lent, in reserve for owners.", counts.kept),
        ):
            yield GaugeMetricFamily(f"twine_elastic_{name}", text, value=value)
        for name, text, ended in (
            ("revoked", "Loans that were recalled and have ended.", counts.revoked),
            ("broken", "Machines that were returned later than promised.", counts.broken),
            ("interrupted", "Tasks that ran when their loan was recalled.", counts.interrupted),
        ):
            yield CounterMetricFamily(f"twine_elastic_{name}", text, value=ended)
