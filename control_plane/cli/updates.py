"""`twinectl job pause | resume | restart | rollback | move`: an owner's control of updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from control_plane.api.jobs import JobStatus
from control_plane.cli import follow, show
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, shows_answer
from control_plane.cli.show import output_option

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_WAIT = click.option("--wait", is_flag=True, help="Return when all tasks are healthy and updated.")

_EXPECT = click.option(
    "--expect", type=click.IntRange(1), metavar="VERSION", help="Only if the job is at it now."
)


@job.command()
@click.argument("name")
@_EXPECT
@shows_answer
def pause(target: Target, name: str, expect: int | None, output: str) -> None:
    """Pause the update of job NAME: no further task is taken down; begun ones are finished.

    Repair, maintenance and stops continue.
    """
    _change(target, "pause", name, output, expect)


def _update(verb: str, text: str) -> click.Command:
    @job.command(verb, help=text)
    @click.argument("name")
    @_EXPECT
    @output_option
    @_WAIT
    @follow.timeout_option
    @click.pass_obj
    def change(
        target: Target, name: str, expect: int | None, output: str, wait: bool, timeout: float
    ) -> None:
        _change(target, verb, name, output, expect, timeout if wait else None)

    return change


resume = _update("resume", "Continue the update of job NAME.")
restart = _update(
    "restart", "Restart every task of job NAME on its machine, as many at once as an update may."
)
rollback = _update(
    "rollback",
    """Go back to the specification of job NAME's previous version.

    The number of tasks and the update policy stay as they are now.
    """,
)


@job.command()
@click.argument("name")
@click.option("--entitlement", required=True, help="Entitlement to which it moves.")
@output_option
@_WAIT
@follow.timeout_option
@click.pass_obj
def move(
    target: Target, name: str, entitlement: str, output: str, wait: bool, timeout: float
) -> None:
    """Move job NAME to another entitlement: task by task, like an update.

    You need the rights of both entitlements. `job rollback` moves it back.
    """

    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.move_job(name, entitlement)
        return await follow.wait_stable(client, name, timeout) if wait else status

    _show(target.ask(work), name, output)


def _change(
    target: Target,
    verb: str,
    name: str,
    output: str,
    expect: int | None,
    timeout_s: float | None = None,
) -> None:
    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.change_job(verb, name, expect)
        return status if timeout_s is None else await follow.wait_stable(client, name, timeout_s)

    _show(target.ask(work), name, output)


def _show(status: JobStatus, name: str, output: str) -> None:
    text = f"job {name}: {follow.summary(status)}"
    show.emit(output, status, lambda: show.lines(text))
