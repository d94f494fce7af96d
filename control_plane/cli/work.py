"""`twinectl work`: best-effort work of the opportunistic scheduler (docs/elastic.md)."""

from __future__ import annotations

from pathlib import Path

import click

from control_plane.api.opportunistic import OPTIMUS_ROUTES, QueuedWork, WorkQueue, WorkRequest
from control_plane.cli import show
from control_plane.cli.images import names_of
from control_plane.cli.jobfile import read_job
from control_plane.cli.local_services import ask_service, socket_option
from control_plane.cli.program import Target, shows_answer
from control_plane.cli.show import output_option

_ROUTE = {route.name: route for route in OPTIMUS_ROUTES}
_SOCKET = socket_option("twine-optimus", "TWINE_OPTIMUS", "/run/twine/optimus.sock")


@click.group()
def work() -> None:
    """Best-effort work on lent machines (docs/elastic.md)."""


@work.command("submit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--priority", type=click.IntRange(0, 1000), default=500, show_default=True)
@click.option("--attempts", type=click.IntRange(1, 100), default=3, show_default=True)
@_SOCKET
@shows_answer
def work_submit(
    target: Target, file: Path, priority: int, attempts: int, socket: str, output: str
) -> None:
    """Submit the work of a job FILE, to run on lent machines."""
    job = read_job(file, (), lambda: names_of(target))
    request = WorkRequest(job=job, priority=priority, attempts=attempts)
    made: QueuedWork = ask_service(
        socket, lambda client: client.call(_ROUTE["submit_work"], request, work=request.job.name)
    )
    show.emit(output, made, lambda: click.echo(f"work {made.name}: {made.state}"))


@work.command("list")
@_SOCKET
@output_option
def work_list(socket: str, output: str) -> None:
    """Show all work, in the order in which it is chosen."""
    found: WorkQueue = ask_service(socket, lambda client: client.call(_ROUTE["list_work"]))
    columns = ("work", "user", "priority", "tasks", "state", "failures", "moves", "reason")
    rows = [
        (
            *(w.name, w.user, w.request.priority, w.request.job.tasks, w.state),
            *(w.failures, w.moves, w.reason or "-"),
        )
        for w in found.work
    ]

    def lines() -> None:
        click.echo(f"entitlement {found.entitlement}: capacity {found.capacity or 'not reported'}")
        if found.failing:
            click.echo(show.printable(f"no work is chosen: {found.failing}"), err=True)
        for name in found.damaged:
            click.echo(f"the record of work {name} is damaged: cancel it as root", err=True)
        show.table(columns, rows)

    show.emit(output, found, lines)


@work.command("cancel")
@click.argument("name")
@_SOCKET
def work_cancel(name: str, socket: str) -> None:
    """Stop a piece of work and remove it."""
    ask_service(socket, lambda client: client.call(_ROUTE["cancel_work"], work=name))
    click.echo(f"work {name} is cancelled")
