"""`twinectl restored`: what runs that a restored store does not know, and what becomes of it."""

from __future__ import annotations

import click

from control_plane.api.restored import FoundTask, Restored, RestoredView
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option


@click.group()
def restored() -> None:
    """After the store was put back from a copy (docs/operating.md)."""


@restored.command("show")
@output_option
@click.pass_obj
def restored_show(target: Target, output: str) -> None:
    """Show how the tasks on machines differ from the copy.

    unknown-job: deployed since; apply its file, then let it go here. not-placed: moved or added
    since. changed: updated since; it stays as it is until its file is applied. missing: removed
    or moved since; it starts again unless its job is stopped first.
    """
    found: RestoredView = target.ask(lambda client: client.show_restored())
    show.emit(output, found, lambda: _print(found))


def _print(found: RestoredView) -> None:
    if found.restored is None:
        click.echo("the store was never put back from a copy")
        return
    head = ("machine", "task", "difference", "job", "entitlement", "state", "since")
    show.table(head, [_row(task) for task in found.tasks])
    if found.unheard:
        names = ", ".join(found.unheard[:20])
        click.echo(show.printable(f"not heard yet: {len(found.unheard)} machines: {names}"))
    released = found.restored.released_at
    if not released:
        click.echo("nothing is commanded before: twinectl restored release")


def _row(task: FoundTask) -> tuple[object, ...]:
    since = "-" if task.since is None else show.ago(task.since)
    state = "-" if task.state is None else task.state.value
    where = (task.machine, task.task, task.difference.value)
    return (*where, task.job, task.entitlement, state, since)


@restored.command("release")
@click.confirmation_option(
    "--yes", prompt="What the copy wants is done then: have you looked at `restored show`?"
)
@output_option
@click.pass_obj
def restored_release(target: Target, output: str) -> None:
    """Let what the restored store wants be done. What it does not know is left alone still."""
    found: Restored = target.ask(lambda client: client.release_restored())
    show.emit(output, found, lambda: click.echo("the restored store is obeyed from now on"))


@restored.command("let-go")
@click.argument("task")
@click.option("--machine", required=True, help="Where it runs.")
@click.pass_obj
def restored_let_go(target: Target, task: str, machine: str) -> None:
    """Let TASK be stopped, which the restored store does not know."""
    target.ask(lambda client: client.let_task_go(machine, task))
    click.echo(show.printable(f"task {task} on {machine} is released"))
