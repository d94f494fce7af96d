"""`twinectl job pause | resume | restart | rollback | move`: what owners do to an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from control_plane.api.jobs import JobStatus
from control_plane.cli import follow, show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option
from wire.options import seconds

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_WAIT = click.option("--wait", is_flag=True, help="Return when all tasks are healthy and updated.")
_TIMEOUT = click.option(
    "--timeout", type=seconds(), default="10m", show_default=True, help="For --wait."
)


@click.command()
@click.argument("name")
@output_option
@click.pass_obj
def pause(target: Target, name: str, output: str) -> None:
    """Take no more tasks of job NAME down for a newer version; what began is finished.

    Failures, maintenance and stops go on.
    """
    _change(target, "pause", name, output)


@click.command()
@click.argument("name")
@output_option
@_WAIT
@_TIMEOUT
@click.pass_obj
def resume(target: Target, name: str, output: str, wait: bool, timeout: float) -> None:
    """Let the update of job NAME go on."""
    _change(target, "resume", name, output, timeout if wait else None)


@click.command()
@click.argument("name")
@output_option
@_WAIT
@_TIMEOUT
@click.pass_obj
def restart(target: Target, name: str, output: str, wait: bool, timeout: float) -> None:
    """Restart every task of job NAME where it is, as many at once as an update may."""
    _change(target, "restart", name, output, timeout if wait else None)


@click.command()
@click.argument("name")
@output_option
@_WAIT
@_TIMEOUT
@click.pass_obj
def rollback(target: Target, name: str, output: str, wait: bool, timeout: float) -> None:
    """Go back to what the version before wanted of the tasks of job NAME.

    How many there are, and how they are updated, stays as it is now.
    """
    _change(target, "rollback", name, output, timeout if wait else None)


@click.command()
@click.argument("name")
@click.option("--entitlement", required=True, help="Where it is to run.")
@output_option
@_WAIT
@_TIMEOUT
@click.pass_obj
def move(
    target: Target, name: str, entitlement: str, output: str, wait: bool, timeout: float
) -> None:
    """Have job NAME run in another entitlement: task by task, as an update goes.

    You need the rights of both. `job rollback` brings it back.
    """

    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.move_job(name, entitlement)
        return await follow.wait_stable(client, name, timeout) if wait else status

    _tell(target.ask(work), name, output)


def _change(
    target: Target, verb: str, name: str, output: str, timeout_s: float | None = None
) -> None:
    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.change_job(verb, name)
        return status if timeout_s is None else await follow.wait_stable(client, name, timeout_s)

    _tell(target.ask(work), name, output)


def _tell(status: JobStatus, name: str, output: str) -> None:
    text = f"job {name}: {follow.summary(status)}"
    show.emit(output, status, lambda: click.echo(show.printable(text)))
