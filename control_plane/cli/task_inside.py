"""`twinectl task exec | logs | top | describe | restart`: single tasks, on their machines."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from agent.usage import TaskUsage
from control_plane.api.operations import REASON_MAX, RestartRequest
from control_plane.api.tasks import TaskDescription
from control_plane.cli import show
from control_plane.cli.events import head, task, task_named
from control_plane.cli.log_text import log_options, show_log
from control_plane.cli.program import Target, shows_answer
from wire.cpus import cpu_list_text
from wire.errors import InvalidInput, NotFound
from wire.units import about_size

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient


@task.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.option(
    "-t", "--tty/--no-tty", default=None, help="Use a terminal; by default if this one is."
)
@click.option("-i", "--stdin/--no-stdin", default=True, help="Forward input; the default.")
@click.argument("command", nargs=-1, required=True)
@click.pass_obj
def exec_(
    target: Target, name: str, tty: bool | None, stdin: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND inside task NAME (as `web-3`), with its rights and limits. Put -- before it.

    For owners of the job; the audit log has every command. Ends with the command's exit code.
    """
    job, index = task_named(name)
    from agent.terminal import is_terminal, run_session, window

    terminal = is_terminal() if tty is None else tty

    async def work(client: ControlPlaneClient) -> int:
        session = client.exec_task(job, index, list(command), tty=terminal, window=window())
        async with session as duplex:
            return await run_session(duplex, terminal=terminal, with_input=stdin)

    sys.exit(target.ask(work))


@task.command()
@click.argument("name")
@log_options
@shows_answer
def logs(target: Target, /, name: str, output: str, **chosen: Any) -> None:
    """Print the output of task NAME (as `web-3`) on its machine; -o json: one object per line."""
    show_log(target, *task_named(name), output, **chosen)


@task.command()
@click.argument("name")
@shows_answer
def describe(target: Target, name: str, output: str) -> None:
    """Show task NAME: its placement, its agent's report, its usage."""
    job, index = task_named(name)
    found = target.ask(lambda client: client.describe_task(job, index))
    show.emit(output, found, lambda: show.table(("what", "value"), _rows(found)))


def _rows(found: TaskDescription) -> list[tuple[str, str]]:
    rows = [
        ("task", found.task),
        ("machine", found.machine),
        ("phase", found.phase + (f": {found.reason}" if found.reason else "")),
        ("version", str(found.version)),
    ]
    if (status := found.status) is not None:
        rows += [
            ("state", f"{status.state}, {status.health}"),
            ("reason", status.reason or "-"),
            ("image", status.image),
            ("unit", status.unit),
            ("own CPUs", cpu_list_text(status.cpus) or "none"),
            ("restarts", str(status.restarts)),
        ]
        if (end := status.last_exit) is not None:
            how = end.signal or ("-" if end.code is None else f"exit code {end.code}")
            rows.append(("last end", f"{end.result}, {how}"))
    return rows + ([] if found.usage is None else _usage(found.usage))


def _usage(usage: TaskUsage) -> list[tuple[str, str]]:
    return [
        ("cpu", f"{usage.cpu_s:.1f} s, throttled for {usage.throttled_s:.1f} s"),
        ("memory", f"{about_size(usage.memory_bytes)}, {usage.oom_kills} OOM kills"),
        ("processes", str(usage.processes)),
    ]


@task.command()
@click.argument("name")
@click.option(
    "--job", "is_job", is_flag=True, help="NAME is a job, even if a task has the same name."
)
@shows_answer
def top(target: Target, name: str, is_job: bool, output: str) -> None:
    """Show the usage of task NAME (as `web-3`), or of all tasks of job NAME, the largest first."""

    async def work(client: ControlPlaneClient) -> list[TaskDescription]:
        if not is_job and (one := await _find_task(client, name)) is not None:
            alone = await client.describe_task(*one)
            if alone.usage is None:
                hint = f"twinectl task describe {name}"
                raise NotFound(f"task {name} has no processes: it is {alone.phase}", hint=hint)
            return [alone]
        return await _used_by(client, name)

    found = target.ask(work)
    used = [(d, d.usage) for d in found if d.usage is not None]
    rows = [
        (d.task, d.machine, f"{u.cpu_s:.1f}", about_size(u.memory_bytes), str(u.processes))
        for d, u in sorted(used, key=lambda pair: -pair[1].memory_bytes)
    ]
    columns = ("task", "machine", "cpu s", "memory", "processes")
    show.emit(output, found, lambda: show.table(columns, rows))


async def _find_task(client: ControlPlaneClient, name: str) -> tuple[str, int] | None:
    """Return job and index of the task of this name; None if only a job has the name.

    Raises `NotFound` if it is neither.
    """
    with suppress(InvalidInput):
        job, index = task_named(name)
        with suppress(NotFound):
            if any(t.index == index for t in (await client.get_job(job)).record.tasks):
                return job, index
    with suppress(NotFound):
        await client.get_job(name)
        return None
    hint = "a task is its job and its index, as web-3; `twinectl job list` shows the jobs"
    raise NotFound(f"there is neither a task nor a job {name}", hint=hint)


async def _used_by(client: ControlPlaneClient, job: str) -> list[TaskDescription]:
    """Return the usage of a job's tasks that have a machine."""
    record = (await client.get_job(job)).record
    gate = asyncio.Semaphore(16)

    async def one(index: int) -> TaskDescription | None:
        async with gate:
            try:
                found: TaskDescription = await client.describe_task(job, index)
                return found
            except NotFound:
                return None  # it left its machine meanwhile

    placed = [t.index for t in record.tasks if t.placement is not None]
    found = await asyncio.gather(*(one(index) for index in placed))
    return [d for d in found if d is not None and d.usage is not None]


@task.command()
@click.argument("name")
@click.option("--reason", default="", help="Shown with the task.")
@click.option("--now", "at_once", is_flag=True, help="Skip the budget and the controller.")
@shows_answer
def restart(target: Target, name: str, reason: str, at_once: bool, output: str) -> None:
    """Stop task NAME (as `web-3`) and start it again where it is.

    It waits for the budget of its job and for its controller, like any operation. With --now it
    does not wait; the required reason is in the audit log. All tasks: `twinectl job restart`.
    """
    job, index = task_named(name)
    request = RestartRequest(reason=reason[:REASON_MAX], now=at_once)
    found = target.ask(lambda client: client.restart_task(job, index, request))
    show.emit(output, found, lambda: show.lines(*head(name, found)))
