"""`twinectl job events` and `twinectl task events`: what was done to tasks, when and why."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

from agent.api import Exit, exit_text
from control_plane.api.operations import REASON_MAX, JobEvent, MoveRequest, TaskStory
from control_plane.cli import show
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, shows_answer
from wire.errors import InvalidInput
from wire.options import former_names, nonempty_name

_COLUMNS = ("nr", "end", "took", "task", "operation", "cause", "outcome", "machines", "reason")
_TASK = re.compile(r"(.+)-([0-9]{1,6})")


@job.command()
@click.argument("name")
@click.option("--after", type=click.IntRange(0), default=0, help="Only events after this number.")
@click.option("--limit", type=click.IntRange(1, 500), default=100, show_default=True)
@shows_answer
def events(target: Target, name: str, after: int, limit: int, output: str) -> None:
    """Show the operations on the tasks of job NAME, oldest first; also after the job is gone."""
    found = target.ask(lambda client: client.job_events(name, after, limit))

    def lines() -> None:
        show.table(_COLUMNS, _rows(name, found.events))
        if found.more:
            show.progress(f"there are more events: --after {found.events[-1].seq}")

    show.emit(output, found, lines)


@click.group()
def task() -> None:
    """Show, restart and move single tasks."""


@former_names(task, "story")
@task.command("events")
@click.argument("name")
@shows_answer
def task_events(target: Target, name: str, output: str) -> None:
    """Show past and present operations on task NAME (as `web-3`)."""
    job, index = task_named(name)

    found = target.ask(lambda client: client.task_story(job, index))

    def lines() -> None:
        show.lines(*head(name, found))
        show.table(_COLUMNS, _rows(job, found.events))

    show.emit(output, found, lines)


@task.command()
@click.argument("name")
@click.option(
    "--to", type=nonempty_name(), metavar="MACHINE", help="[default: the best other machine]"
)
@click.option("--reason", required=True, help="Kept with the operation.")
@shows_answer
def move(target: Target, name: str, to: str | None, reason: str, output: str) -> None:
    """Move task NAME (as `web-3`): it stops, and starts on another machine.

    It waits for the budget of its job and for its controller, like any operation.
    """
    job, index = task_named(name)
    request = MoveRequest(to=to or "", reason=reason[:REASON_MAX])
    found = target.ask(lambda client: client.move_task(job, index, request))
    show.emit(output, found, lambda: show.lines(*head(name, found)))


def task_named(name: str) -> tuple[str, int]:
    """Return job and index of a task, or refuse an invalid name."""
    match = _TASK.fullmatch(name)
    if match is None:
        raise InvalidInput(
            (f"{name!r} is not the name of a task"), hint="its job and its index, as web-3"
        )
    return match[1], int(match[2])


def head(name: str, found: TaskStory) -> list[str]:
    """Return what is being done to a task, in lines."""
    if not found.phase:
        return [f"task {name}: gone"]
    where = f" on {found.machine}" if found.machine else ""
    head = [f"task {name}: {found.phase}{where}{f': {found.reason}' if found.reason else ''}"]
    if (now := found.now) is not None:
        since = show.ago(now.since)
        why = f": {now.reason}" if now.reason else ""
        head.append(f"  {now.kind} because of {now.cause}, {now.state} for {since}{why}")
    if found.restarts or found.last_exit is not None:
        head.append(f"  {found.restarts} restart(s) of this run{_last(found.last_exit)}")
        head.append(f"  its last output: twinectl job logs {found.job} {found.task} --previous")
    return head


def _last(last: Exit | None) -> str:
    return "" if last is None else f", last {exit_text(last)}, {show.ago(last.at)} ago"


def _rows(job: str, found: Iterable[JobEvent]) -> list[tuple[object, ...]]:
    return [
        (
            event.seq,
            show.local_time(event.end),
            show.duration(event.end - event.start),
            f"{job}-{event.task}" if event.task is not None else job,
            event.kind.value,
            event.cause.value,
            event.outcome.value,
            " → ".join(m for m in (event.from_machine, event.to_machine) if m) or "-",
            event.reason,
        )
        for event in found
    ]
