"""`twinectl work`: best-effort work of the opportunistic scheduler (docs/elastic.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from control_plane.api.opportunistic import OPTIMUS_ROUTES, QueuedWork, WorkQueue, WorkRequest
from control_plane.cli import show
from control_plane.cli.images import names_of
from control_plane.cli.jobfile import read_job
from control_plane.cli.program import Target
from control_plane.cli.show import output_option

if TYPE_CHECKING:
    from wire.client import WireClient

DEFAULT_SOCKET = "/run/twine/optimus.sock"
_ROUTE = {route.name: route for route in OPTIMUS_ROUTES}
_SOCKET = click.option(
    "--socket",
    envvar="TWINE_OPTIMUS",
    default=DEFAULT_SOCKET,
    show_default=True,
    metavar="PATH",
    help="Socket of twine-optimus.",
)


@click.group()
def work() -> None:
    """Best-effort work on lent machines (docs/elastic.md)."""


def _ask(socket: str, call: Callable[[WireClient], Awaitable[Any]]) -> Any:
    from wire.client import WireClient

    async def asked() -> Any:
        async with WireClient(f"unix:{socket}") as client:
            return await call(client)

    return asyncio.run(asked())


@work.command("submit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--priority", type=click.IntRange(0, 1000), default=500, show_default=True)
@click.option("--attempts", type=click.IntRange(1, 100), default=3, show_default=True)
@_SOCKET
@output_option
@click.pass_obj
def work_submit(
    target: Target, file: Path, priority: int, attempts: int, socket: str, output: str
) -> None:
    """Submit the work of a job FILE, to run on lent machines."""
    job = read_job(file, (), lambda: names_of(target))
    request = WorkRequest(job=job, priority=priority, attempts=attempts)
    made: QueuedWork = _ask(
        socket, lambda client: client.call(_ROUTE["submit_work"], request, work=request.job.name)
    )
    show.emit(output, made, lambda: click.echo(f"work {made.name}: {made.state}"))


@work.command("list")
@_SOCKET
@output_option
def work_list(socket: str, output: str) -> None:
    """Show all work, in the order in which it is chosen."""
    found: WorkQueue = _ask(socket, lambda client: client.call(_ROUTE["list_work"]))
    columns = ("work", "user", "priority", "tasks", "state", "failures", "moves", "reason")
    rows = [
        (
            *(
                w.name,
                w.user,
                w.request.priority,
                w.request.job.tasks,
                w.state,
                w.failures,
                w.moves,
            ),
            w.reason or "-",
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
    _ask(socket, lambda client: client.call(_ROUTE["cancel_work"], work=name))
    click.echo(f"work {name} is cancelled")
