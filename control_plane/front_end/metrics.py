"""Metrics: the front end's own counts, and the services' counts at each scrape.

A scrape reads counts and iterates over no machines and no jobs, so its time does not depend on the
size of the region.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Sized
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
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
from control_plane.roles import ControlPlane
from control_plane.scheduler.counters import Counters
from wire.process_metrics import add_process_metrics
from wire.routes import Route

NextHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Metrics:
    """One registry per process; labels are bounded: no names of jobs, tasks or machines."""

    def __init__(
        self,
        routes: Sequence[Route],
        plane: ControlPlane,
        ending_certificates: Callable[[], Sequence[str]] = list,
        duplicates: Sized = (),
        rebalancer: ReBalancer | None = None,
        elastic: Callable[[], ElasticCounts] = ElasticCounts,
    ) -> None:
        """Declare the metrics; the process of a shard has no counts of the last four."""
        self._names = {(r.method, r.path): r.name for r in routes}
        self._of_route: dict[str, Histogram] = {}
        self._registry = add_process_metrics(CollectorRegistry())
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
        self._collect(partial(_state_metrics, plane.counters))
        self._collect(partial(_health_metrics, plane.health))
        self._collect(lambda: _limit_metrics(plane.limits.views(plane.clock())))
        self._collect(lambda: _alarm_metrics(plane.quarantined, ending_certificates(), duplicates))
        self._collect(partial(_allocator_metrics, plane.allocations))
        if rebalancer is not None:
            self._collect(partial(_rebalance_metrics, rebalancer))
        self._collect(lambda: _elastic_metrics(elastic()))
        self._collect(lambda: _role_metrics(plane.process_counts()))

    def _collect(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._registry.register(_FunctionCollector(collect))

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


class _FunctionCollector(Collector):
    """Metrics that a function returns at each scrape."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()


def _role_metrics(of: ProcessStatus) -> Iterator[Metric]:
    """The role that this process leads and since when, its lag, and the state of the store."""
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


def _state_metrics(counters: Counters) -> Iterator[Metric]:
    """Machines by state and tasks by phase; absent ones are 0."""
    machines = GaugeMetricFamily("twine_machines", "Machines by state.", labels=["state"])
    for state in MachineState:
        machines.add_metric([state.value], counters.machines[state])
    yield machines
    everything = sum(counters.machines[state] for state in MachineState)
    yield GaugeMetricFamily(
        "twine_fleet_health_ratio",
        "Share of the machines that are up, from 0 to 1; without any it is 1.",
        value=counters.machines[MachineState.UP] / everything if everything else 1.0,
    )
    tasks = GaugeMetricFamily("twine_tasks", "Tasks by phase.", labels=["phase"])
    for phase in TaskPhase:
        tasks.add_metric([phase.value], counters.tasks[phase])
    yield tasks


def _health_metrics(health: HealthService) -> Iterator[Metric]:
    """Machines whose silence has no effect yet; alarm while the number is not 0."""
    yield GaugeMetricFamily(
        "twine_machines_held_back",
        "Silent or returned machines whose state is not decided yet.",
        value=health.count(),
    )


def _limit_metrics(views: LimitViews) -> Iterator[Metric]:
    """Operations that limits let pass and hold back; alarm while a limit holds any back."""
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
    for view in views.limits:
        held.add_metric([view.name.value], bool(view.reason))
        lifted.add_metric([view.name.value], view.lifted_for_s is not None)
        passed.add_metric([view.name.value], view.passed)
        refused.add_metric([view.name.value], view.refused)
    yield from (held, lifted, passed, refused)


def _alarm_metrics(
    quarantined: Sized, ending_certificates: Sized, duplicates: Sized
) -> Iterator[Metric]:
    """Records and certificates that need an operator."""
    for name, text, found in (
        (
            "quarantined_records",
            "Stored records that are unusable and were set aside (check-store).",
            quarantined,
        ),
        (
            "identities_ending",
            "Hosts whose certificates end within a week without a renewal.",
            ending_certificates,
        ),
        (
            "duplicate_identities",
            "Machines with a clone, a host with the same identity (twinectl machine duplicates).",
            duplicates,
        ),
    ):
        yield GaugeMetricFamily(f"twine_{name}", text, value=len(found))


def _rebalance_metrics(rebalancer: ReBalancer) -> Iterator[Metric]:
    """The results of the last plan, and of moves."""
    status, counts = rebalancer.status(), rebalancer.counts
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
            bool(rebalancer.alarm()),
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


def _allocator_metrics(allocations_of_shards: Sequence[Allocations]) -> Iterator[Metric]:
    """The work of the allocators, and the size of the region (the paper's Figure 12)."""
    counts = [allocations.counts for allocations in allocations_of_shards]
    indexes = [allocations.index for allocations in allocations_of_shards]
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


def _elastic_metrics(counts: ElasticCounts) -> Iterator[Metric]:
    """Loans, and whether their promises are kept; alarm while a machine is late."""
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
