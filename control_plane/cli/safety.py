"""`twinectl limit` and `twinectl restored`: limits of the control plane, and how to lift them."""

from __future__ import annotations

import click

from control_plane.api.limits import Lift, LimitName, LimitView
from control_plane.api.restored import FoundTask, RestoredView
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from wire.options import former_names, seconds


@click.group()
def limit() -> None:
    """Limits on operations that stop, move, take away or delete."""


@limit.command("list")
@shows_answer
def limit_list(target: Target, output: str) -> None:
    """Show all limits, how much passed them, and what they hold back and why."""
    found = target.ask(lambda client: client.list_limits())
    columns = ("limit", "per s", "at once", "passed", "held", "refused", "why, or lifted by")
    rows = [_row(view) for view in found.limits]
    show.emit(output, found, lambda: show.table(columns, rows))


def _row(view: LimitView) -> tuple[object, ...]:
    why = view.reason or "-"
    if view.lifted_for_s is not None:
        left = show.duration(view.lifted_for_s)
        why = f"lifted by {view.lifted_by} for {left} more: {view.lifted_why}"
    rate = f"{view.per_s:g}"
    return (view.name.value, rate, view.burst, view.passed, view.held, view.refused, why)


@limit.command("lift")
@click.argument("name", type=click.Choice([name.value for name in LimitName]))
@click.option("--for", "for_s", type=seconds(), default="10m", show_default=True, help="Duration.")
@click.option("--reason", required=True, help="Kept in the audit log.")
@shows_answer
def limit_lift(target: Target, name: str, for_s: float, reason: str, output: str) -> None:
    """Lift limit NAME for a while; --for 0s restores it."""
    request = Lift(for_s=for_s, reason=reason)
    found = target.ask(lambda client: client.lift_limit(name, request))
    text = f"limit {name}: lifted for {show.duration(found.lifted_for_s)}"
    text = text if found.lifted_for_s else f"limit {name} holds"
    show.emit(output, found, lambda: show.lines(text))


@click.group()
def restored() -> None:
    """After the store was restored from a copy (docs/operating.md)."""


@restored.command("show")
@shows_answer
def restored_show(target: Target, output: str) -> None:
    """Show how the tasks on machines differ from the copy.

    unknown-job: deployed since; apply its file, then permit its stop here. not-placed: moved or
    added since. changed: updated since; it stays as it is until its file is applied. missing:
    removed or moved since; it starts again unless its job is stopped first.
    """
    target.show(output, lambda client: client.show_restored(), _print)


def _print(found: RestoredView) -> None:
    if found.restored is None:
        click.echo("the store was never restored from a copy")
        return
    head = ("machine", "task", "difference", "job", "entitlement", "state", "since")
    show.table(head, [_task_row(task) for task in found.tasks])
    if found.unheard:
        names = ", ".join(found.unheard[:20])
        show.lines(f"no report yet: {len(found.unheard)} machines: {names}")
    released = found.restored.released_at
    if not released:
        click.echo("the control plane sends no commands before: twinectl restored release")


def _task_row(task: FoundTask) -> tuple[object, ...]:
    since = "-" if task.since is None else show.ago(task.since)
    state = "-" if task.state is None else task.state.value
    where = (task.machine, task.task, task.difference.value)
    return (*where, task.job, task.entitlement, state, since)


@restored.command("release")
@click.confirmation_option(
    "--yes", prompt="The control plane then acts on the copy. Have you read `restored show`?"
)
@shows_answer
def restored_release(target: Target, output: str) -> None:
    """Let the control plane act on the restored store; tasks unknown to it stay untouched."""
    found = target.ask(lambda client: client.release_restored())
    show.emit(
        output,
        found,
        lambda: click.echo("the control plane acts on the restored store from now on"),
    )


@former_names(restored, "let-go")
@restored.command("stop")
@click.argument("task")
@click.option("--machine", required=True, help="Machine on which it runs.")
@click.pass_obj
def restored_stop(target: Target, task: str, machine: str) -> None:
    """Permit the stop of TASK, which the restored store does not know."""
    target.ask(lambda client: client.let_task_go(machine, task))
    show.lines(f"task {task} on {machine} is released")
