"""The autoscaler's server: its routes on a unix socket, and metrics for Prometheus."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from wire.errors import ConfigError, Forbidden
from wire.fairness import Peer
from wire.peers import local_user
from wire.process_metrics import of_process
from wire.routes import Route
from wire.server import Call, http_log, make_app

_http_log = http_log(__name__)


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
                "Jobs whose size is held against what their load says.",
                sum(1 for r in known if r.held),
            ),
            "tasks": ("Tasks of these jobs, as wanted.", sum(v.tasks for v in views.sizings)),
            "tasks_recommended": ("Tasks that their loads need.", sum(r.wanted for r in known)),
            "round_seconds": ("How long the last round took.", self._autoscaler.round_s),
            "last_round_timestamp_seconds": ("When a round last worked.", views.round_at),
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

    return make_app(
        "Twine autoscaler",
        (*AUTOSCALER_ROUTES, *LOAD_TEST_ROUTES),
        {
            f.__name__: f
            for f in (
                *(list_sizings, get_sizing, simulate_sizing),
                *(begin_load_test, get_load_test, end_load_test),
            )
        },
        _authorize,
        version=metadata.version("twine-cluster"),
        metrics=metrics_of(autoscaler),
    )


def metrics_of(autoscaler: Autoscaler) -> Callable[[], bytes]:
    """Return the function that makes the text of all metrics."""
    registry = of_process(CollectorRegistry())
    registry.register(AutoscalerMetrics(autoscaler))
    return lambda: generate_latest(registry)


def _authorize(request: web.Request, _: Route) -> Peer:
    """Return the caller; the mode of the socket's file says who may open it."""
    user = local_user(request.transport)
    if user is None:
        raise Forbidden("the autoscaler answers on its unix socket only")
    return Peer(name=f"local:{user[0]}", role="local", is_trusted=user[0] in (0, os.getuid()))


@asynccontextmanager
async def serving(
    autoscaler: Autoscaler, tester: LoadTester, path: Path, metrics: str
) -> AsyncIterator[None]:
    """Serve until left: routes on a unix socket, metrics on HOST:PORT (empty: nowhere else)."""
    runner = web.AppRunner(application(autoscaler, tester), handle_signals=False, logger=_http_log)
    plain = web.Application()
    text = metrics_of(autoscaler)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=text(), content_type="text/plain")

    plain.router.add_get("/metrics", scrape)
    scraped = web.AppRunner(plain, handle_signals=False, logger=_http_log)
    mask = os.umask(0o117)
    try:
        await runner.setup()
        await scraped.setup()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the store's lock is held: no other process serves there
        await web.UnixSite(runner, str(path)).start()
        if metrics:
            host, _, port = metrics.rpartition(":")
            await web.TCPSite(scraped, host.strip("[]"), int(port)).start()
    except OSError as e:
        raise ConfigError(f"cannot listen on {path} or {metrics}: {e.strerror or e}") from e
    finally:
        os.umask(mask)
    try:
        yield
    finally:
        await runner.cleanup()
        await scraped.cleanup()
        path.unlink(missing_ok=True)
