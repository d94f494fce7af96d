"""`twinectl autoscale`: recommendations, their reasons, and the cost of other policies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from control_plane.api.load_tests import LOAD_TEST_ROUTES, LoadTest, LoadTestRequest, LoadTestState
from control_plane.api.sizings import AUTOSCALER_ROUTES, Simulation, SizingView, SizingViews
from control_plane.cli import show
from control_plane.cli.jobfile import read_job
from control_plane.cli.local_services import ask_service, socket_option
from control_plane.cli.show import output_option
from wire import options
from wire.errors import InvalidInput
from wire.routes import invalid
from wire.violations import violations

if TYPE_CHECKING:
    from wire.client import WireClient


_TEST = {route.name: route for route in LOAD_TEST_ROUTES}
_ROUTE = {route.name: route for route in AUTOSCALER_ROUTES}
_SOCKET = socket_option("twine-autoscaler", "TWINE_AUTOSCALER", "/run/twine/autoscaler.sock")
_TIMEOUT_S = 120.0
"""Time limit of a call: to replay the history of a large job takes long."""


@click.group()
def autoscale() -> None:
    """Sizes that follow the load (docs/autoscaling.md)."""


def _ask(socket: str, work: Callable[[WireClient], Awaitable[Any]]) -> Any:
    return ask_service(socket, work, _TIMEOUT_S)


@autoscale.command("load-test")
@click.argument("job")
@click.option(
    "--task", type=click.IntRange(0), default=0, show_default=True, help="Index of the task."
)
@click.option(
    "--load", required=True, metavar="PROMQL", help="Load of the task; $task stands for its name."
)
@click.option(
    "--latency", required=True, metavar="PROMQL", help="Latency of its answers, in seconds."
)
@click.option(
    "--latency-max",
    type=options.seconds(),
    required=True,
    help="Latency limit; the test ends above it.",
)
@click.option(
    "--errors", default="", metavar="PROMQL", help="Share of its answers that are errors."
)
@click.option("--errors-max", type=options.part(), default=0.01, show_default=True)
@click.option(
    "--most",
    type=float,
    default=8.0,
    show_default=True,
    help="Limit of its requests, as a multiple of the usual number.",
)
@click.option("--step", type=options.seconds(), default="60s", show_default=True)
@_SOCKET
@output_option
def load_test(job: str, socket: str, output: str, **given: Any) -> None:
    """Find how much load a task of JOB carries, with the job's own requests.

    A proxy that follows discovery sends one task a growing share of them, until latency or errors
    reach their limit. Then all tasks get their usual share again, also after Ctrl-C.
    """
    document = {
        **{key: given[key] for key in ("task", "load", "latency", "errors", "errors_max", "most")},
        **{"latency_max_s": given["latency_max"], "step_s": given["step"]},
    }
    if found := violations(document, LoadTestRequest):
        raise invalid(found, "load-test")
    request = msgspec.convert(document, LoadTestRequest)

    async def work(client: WireClient) -> LoadTest:
        test: LoadTest = await client.call(_TEST["begin_load_test"], request, job=job)
        try:
            while test.state is LoadTestState.RUNNING:
                await asyncio.sleep(1.0)
                test = await client.call(_TEST["get_load_test"], job=job)
        except asyncio.CancelledError:
            await client.call(_TEST["end_load_test"], job=job)
            raise
        return test

    shown: LoadTest = _ask(socket, work)

    def lines() -> None:
        rows = [
            (f"{s.multiple:g}", f"{s.load:.4g}", f"{s.latency_s:.3g}", f"{s.errors:.2%}")
            for s in shown.steps
        ]
        show.table(("times usual", "load", "latency s", "errors"), rows)
        carries = "an unknown load" if shown.capacity is None else f"{shown.capacity:.4g}"
        click.echo(f"{shown.state}: {show.printable(shown.reason)}; {shown.task} carries {carries}")

    show.emit(output, shown, lines)


@autoscale.command()
@_SOCKET
@output_option
def status(socket: str, output: str) -> None:
    """Show all autoscaled jobs: size, recommendation, and reasons against a change."""
    found: SizingViews = _ask(socket, lambda client: client.call(_ROUTE["list_sizings"]))
    columns = ("job", "mode", "healthy", "tasks", "recommended", "load", "forecast", "note")
    rows = [_row(view) for view in found.sizings]

    def lines() -> None:
        if found.failing:
            click.echo(show.printable(f"sizes are held: {found.failing}"), err=True)
        show.table(columns, rows)

    show.emit(output, found, lines)


def _row(view: SizingView) -> tuple[object, ...]:
    found = view.recommendation
    if found is None:
        return (view.job, view.mode.value, view.healthy, view.tasks, "-", "-", "-", "not evaluated")
    load = "-" if found.load is None else f"{found.load:.4g}"
    ahead = "-" if found.forecast is None else f"{found.forecast.load:.4g}"
    note = found.held or (view.written if "refused" in view.written else "") or "-"
    return (view.job, view.mode.value, view.healthy, view.tasks, found.tasks, load, ahead, note)


@autoscale.command()
@click.argument("job")
@_SOCKET
@output_option
def explain(job: str, socket: str, output: str) -> None:
    """Show why JOB has its size: load, forecast, limits, and reasons against a change."""
    found: SizingView = _ask(socket, lambda client: client.call(_ROUTE["get_sizing"], job=job))
    show.emit(output, found, lambda: show.table(("what", "value"), _explained(found)))


def _explained(view: SizingView) -> list[tuple[str, str]]:
    rows = [
        ("job", f"{view.job} of entitlement {view.entitlement}, mode {view.mode.value}"),
        ("size", f"{view.tasks} tasks, {view.healthy} healthy"),
    ]
    if (found := view.recommendation) is not None:
        rows.append(("recommended", f"{found.tasks} tasks, {show.ago(found.at)} ago"))
        rows += [("", part) for part in found.reason.split("; ")]
        if (ahead := found.forecast) is not None:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in ahead.by.items())
            rows.append(("forecast by", shares))
    held = "-" if view.forecasts_held is None else f"{view.forecasts_held:.1%}"
    since = view.history_from
    begun = "-" if since is None else f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M} UTC"
    rows += [
        ("forecasts that were correct", held),
        ("slowest start", show.duration(view.start_s)),
        ("history from", begun),
        *_largest(view),
        *_latency_rows(view),
        ("last change", view.written or "-"),
    ]
    return rows


def _largest(view: SizingView) -> list[tuple[str, str]]:
    """Return the day with the largest load; nothing before a load was measured."""
    if not view.day_peaks:
        return []
    at, load = max(view.day_peaks, key=lambda peak: peak[1])
    day = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
    return [("largest load", f"{load:.4g} on {day}, of {len(view.day_peaks)} days")]


def _latency_rows(view: SizingView) -> list[tuple[str, str]]:
    """Return the learnt latency and its age; nothing if the job has no latency target."""
    if view.latency_at is None:
        return []
    load = "not known yet" if view.carried is None else f"{view.carried:.4g}"
    return [("a task carries", f"{load}; latency last measured {show.ago(view.latency_at)} ago")]


@autoscale.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Override the file.")
@_SOCKET
@output_option
def simulate(file: Path, settings: tuple[str, ...], socket: str, output: str) -> None:
    """Replay the history of the job of FILE under the [autoscale] of FILE; change nothing.

    For instance: twinectl autoscale simulate web.toml --set autoscale.target=0.7
    """
    spec = read_job(file, settings, is_image_known=False)
    if spec.autoscale is None:
        raise InvalidInput(f"{file} has no [autoscale] table")
    found: Simulation = _ask(
        socket,
        lambda client: client.call(_ROUTE["simulate_sizing"], spec.autoscale, job=spec.name),
    )
    show.emit(output, found, lambda: _print_simulation(found))


def _print_simulation(found: Simulation) -> None:
    if found.own.minutes == 0:
        click.echo(f"job {show.printable(found.job)} has no history to replay yet")
        return
    costs = {"present policy": found.own, "policy in the file": found.other, "fixed": found.fixed}
    rows = [
        (
            name,
            f"{c.mean_size:.1f}",
            c.peak_size,
            f"{c.idle / 60:.1f}",
            f"{c.missing / 60:.1f}",
            c.short_minutes,
            c.changes,
        )
        for name, c in costs.items()
    ]
    columns = (
        *("policy", "mean tasks", "most", "idle task-hours", "missing task-hours"),
        *("minutes short", "changes"),
    )
    show.table(columns, rows)
    click.echo(
        f"{found.days:.1f} days of {show.printable(found.job)}; new tasks are healthy after"
        f" {show.duration(found.start_s)}"
    )
