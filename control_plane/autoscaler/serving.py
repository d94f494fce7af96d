"""The autoscaler's server: its routes on a unix socket, and metrics for Prometheus."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.api import Ack
from control_plane.api.load_tests import LOAD_TEST_ROUTES, LoadTest
from control_plane.api.sizings import AUTOSCALER_ROUTES, Simulation, SizingView, SizingViews
from control_plane.autoscaler.load_tester import LoadTester
from control_plane.autoscaler.service import Autoscaler
from wire import listen
from wire.errors import Forbidden
from wire.fairness import Peer
from wire.peers import local_user
from wire.process_metrics import add_process_metrics
from wire.routes import Route
from wire.server import Call, make_app


class AutoscalerMetrics(Collector):
    """Counts and sums of the autoscaler; no label names a job."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        views, counts = self._autoscaler.views(), self._autoscaler.counts
        changes = CounterMetricFamily(
            "twine_autoscaler_events", "Changes of sizes and of rounds, by kind.", labels=["kind"]
        )
        for kind in ("up", "down", "refused", "held", "rounds", "failed rounds"):
            changes.add_metric([kind.replace(" ", "-")], counts[kind])
        known = [v.recommendation for v in views.sizings if v.recommendation is not None]
        gauges = {
            "jobs": ("Jobs with [autoscale].", len(views.sizings)),
            "jobs_held": (
                "Jobs whose size is held although their load asks for another.",
                sum(1 for r in known if r.held),
            ),
            "tasks": ("Requested tasks of these jobs.", sum(v.tasks for v in views.sizings)),
            "tasks_recommended": ("Tasks required by their loads.", sum(r.wanted for r in known)),
            "round_seconds": ("Duration of the last round.", self._autoscaler.round_s),
            "last_round_timestamp_seconds": ("Time of the last successful round.", views.round_at),
        }
        return [
            changes,
            *(
                GaugeMetricFamily(f"twine_autoscaler_{name}", text, value)
                for name, (text, value) in gauges.items()
            ),
        ]


def application(autoscaler: Autoscaler, tester: LoadTester) -> web.Application:
    """Return the application of the unix socket."""

    async def list_sizings(_: Call) -> SizingViews:
        return autoscaler.views()

    async def get_sizing(call: Call) -> SizingView:
        return autoscaler.view(call.path["job"])

    async def begin_load_test(call: Call) -> LoadTest:
        return await tester.begin(call.path["job"], call.body)

    async def get_load_test(call: Call) -> LoadTest:
        return tester.find(call.path["job"])

    async def end_load_test(call: Call) -> Ack:
        await tester.end(call.path["job"])
        return Ack()

    async def simulate_sizing(call: Call) -> Simulation:
        return await autoscaler.simulation(call.path["job"], call.body)

    sizings = (list_sizings, get_sizing, simulate_sizing)
    load_tests = (begin_load_test, get_load_test, end_load_test)
    return make_app(
        "Twine autoscaler",
        (*AUTOSCALER_ROUTES, *LOAD_TEST_ROUTES),
        {handler.__name__: handler for handler in (*sizings, *load_tests)},
        _authorize,
        version=metadata.version("twine-cluster"),
        metrics=metrics_of(autoscaler),
    )


def metrics_of(autoscaler: Autoscaler) -> Callable[[], bytes]:
    """Return the function that makes the text of all metrics."""
    registry = add_process_metrics(CollectorRegistry())
    registry.register(AutoscalerMetrics(autoscaler))
    return lambda: generate_latest(registry)


def _authorize(request: web.Request, _: Route) -> Peer:
    """Return the caller; the mode of the socket's file decides which users may open it."""
    user = local_user(request.transport)
    if user is None:
        raise Forbidden("the autoscaler answers on its unix socket only")
    return Peer(name=f"local:{user[0]}", role="local", is_trusted=user[0] in (0, os.getuid()))


@asynccontextmanager
async def serving(
    autoscaler: Autoscaler, tester: LoadTester, path: Path, metrics: str
) -> AsyncIterator[None]:
    """Serve until left: routes on a unix socket, metrics on HOST:PORT (empty: nowhere else)."""
    plain = web.Application()
    text = metrics_of(autoscaler)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=text(), content_type="text/plain")

    plain.router.add_get("/metrics", scrape)
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(listen.local_socket(path, is_shared=True))
        app = application(autoscaler, tester)
        await stack.enter_async_context(listen.serving(app, None, None, sock))
        if metrics:
            host, _, port = metrics.rpartition(":")
            tcp = listen.tcp_socket(host.strip("[]"), int(port))
            await stack.enter_async_context(listen.serving(plain, tcp, None, None))
        yield
