"""`twinectl job`: apply, status, list, logs, stop, endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent.api import exit_text
from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.cli import follow, show
from control_plane.cli.images import names_of
from control_plane.cli.jobfile import read_job
from control_plane.cli.log_text import log_options, show_log
from control_plane.cli.program import Target, shows_answer
from wire.errors import TwineError
from wire.units import size_text

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_TASK_COLUMNS = (
    *("task", "phase", "health", "machine", "ports", "version"),
    *("restarts", "last exit", "reason"),
)


@click.group()
def job() -> None:
    """Deploy jobs, show their state, stop them."""


@job.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check everything, but change nothing.")
@click.option("--new", "is_new", is_flag=True, help="Refuse a job that exists already.")
@click.option("--wait", is_flag=True, help="Return when all tasks are healthy and up to date.")
@follow.timeout_option
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Override the file.")
@shows_answer
def apply(
    target: Target,
    file: Path,
    dry_run: bool,
    is_new: bool,
    wait: bool,
    timeout: float,
    settings: tuple[str, ...],
    output: str,
) -> None:
    """Create the job of FILE (TOML or YAML), or update it."""
    spec = read_job(file, settings, lambda: names_of(target))

    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.apply_job(spec, dry_run=dry_run, is_new=is_new)
        if wait and not dry_run:
            return await follow.wait_stable(client, spec.name, timeout, status.record.version)
        return status

    status = target.ask(work)
    outcome = "valid, nothing changed" if dry_run else follow.summary(status)
    show.emit(output, status, lambda: show.lines(f"job {spec.name}: {outcome}"))


@job.command()
@click.argument("name")
@click.option("--watch", is_flag=True, help="Show it again after each change, until Ctrl-C.")
@click.option("--wait", is_flag=True, help="Return when all tasks are healthy and up to date.")
@follow.timeout_option
@shows_answer
def status(target: Target, name: str, watch: bool, wait: bool, timeout: float, output: str) -> None:
    """Show a job and each of its tasks."""
    if watch:
        image_names = _image_names(target) if output == "table" else {}
        target.ask(lambda client: _watch(client, name, output, image_names))
        return
    if wait:
        found = target.ask(lambda client: follow.wait_stable(client, name, timeout))
    else:
        found = target.ask(lambda client: client.get_job(name))
    show.emit(output, found, lambda: _print_status(found, _image_names(target)))


@job.command("list")
@shows_answer
def list_(target: Target, output: str) -> None:
    """Show all jobs."""
    found = target.ask(lambda client: client.list_jobs())
    image_names = _image_names(target) if output == "table" else {}
    rows = [
        (
            s.record.name,
            f"{s.phase.value}, paused" if s.record.paused else s.phase.value,
            f"{s.healthy}/{s.wanted}",
            s.record.version,
            s.record.spec.entitlement,
            " ".join([s.record.spec.image[7:19], *image_names.get(s.record.spec.image, ())]),
            s.detail,
        )
        for s in found.jobs
    ]
    columns = ("job", "phase", "healthy", "version", "entitlement", "image", "detail")
    show.emit(output, found, lambda: show.table(columns, rows))


@job.command()
@click.argument("name")
@click.argument("index", type=click.IntRange(0, 999_999))
@log_options
@shows_answer
def logs(target: Target, /, name: str, index: int, output: str, **chosen: Any) -> None:
    """Show the output of task INDEX of job NAME; -o json prints one object per line."""
    show_log(target, name, index, output, **chosen)


@job.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Return when no task is left.")
@follow.timeout_option
@shows_answer
def stop(target: Target, name: str, wait: bool, timeout: float, output: str) -> None:
    """Stop all tasks of a job and remove it."""

    async def work(client: ControlPlaneClient) -> JobStatus:
        status = await client.stop_job(name)
        if wait:
            await follow.wait_gone(client, name, timeout)
        return status

    status = target.ask(work)
    word = "stopped" if wait else "stopping"
    show.emit(output, status, lambda: show.lines(f"job {name}: {word}"))


@job.command()
@click.argument("name")
@click.option(
    "--shard", help="Only the tasks that serve this shard, in the order in which to ask them."
)
@shows_answer
def endpoints(target: Target, name: str, shard: str | None, output: str) -> None:
    """Show the addresses of the healthy tasks of a job."""
    found = target.ask(
        lambda client: client.shard(name, shard) if shard else client.endpoints(name)
    )
    rows = [
        (e.task, port, f"{e.host}:{number}" if number else e.host, e.machine, e.version, e.weight)
        for e in found.endpoints
        for port, number in (e.ports or {"-": 0}).items()
    ]
    columns = ("task", "port", "address", "machine", "version", "weight")
    show.emit(output, found, lambda: show.table(columns, rows))


def _task_rows(status: JobStatus) -> list[list[str]]:
    rows = []
    for task in status.record.tasks:
        where = task.placement
        ports = ",".join(f"{k}={v}" for k, v in where.ports.items()) if where else ""
        cells = (
            f"{status.record.name}-{task.index}",
            task.phase.value,
            task.health.value,
            where.machine if where else "-",
            ports or "-",
            task.version,
            task.restarts,
            exit_text(task.last_exit) if task.last_exit is not None else "-",
            task.reason,
        )
        rows.append([show.printable(c) for c in cells])
    return rows


def _image_names(target: Target) -> dict[str, list[str]]:
    """Return the names of each image of the image store; none if it cannot be reached."""
    found: dict[str, list[str]] = {}
    try:
        for name, digest in names_of(target).items():
            found.setdefault(digest, []).append(name)
    except TwineError:
        return {}
    return found


def _print_status(status: JobStatus, image_names: Mapping[str, list[str]]) -> None:
    show.lines(*_head_lines(status, image_names))
    show.table(_TASK_COLUMNS, _task_rows(status))


def _head_lines(status: JobStatus, image_names: Mapping[str, list[str]]) -> list[str]:
    """Return the lines above the tasks; each reason once, however many tasks share it.

    `image_names` has the names of images by digest.
    """
    spec = status.record.spec
    names = image_names.get(spec.image, ())
    why = follow.reasons(status) or [status.detail]
    return [
        f"job {status.record.name}: {follow.summary(status)}",
        f"entitlement {spec.entitlement}, image {' '.join([spec.image, *names])}",
        *_spec_lines(spec),
        *(f"  {line}" for line in dict.fromkeys([*why, status.update]) if line),
    ]


def _spec_lines(spec: JobSpec) -> list[str]:
    """Return the volumes, credentials and identity of each task, as lines."""
    volumes = [
        f"{name} ({v.kind.value}{' of ' + v.source if v.source else ''}) at {v.path}"
        + (f", at most {size_text(v.max_bytes)}" if v.max_bytes is not None else "")
        for name, v in spec.volumes.items()
    ]
    credentials = [f"{name} as {file}" for file, name in spec.credentials.items()]
    own = (
        [(f"a certificate for each task, as spiffe://…/job/{spec.name}/task/{spec.name}-N")]
        if spec.identity
        else []
    )
    lines = (
        ("volumes", volumes, "; "),
        ("credentials", credentials, ", "),
        ("identity", own, ""),
    )
    return [f"{what}: {between.join(found)}" for what, found, between in lines if found]


async def _watch(
    client: ControlPlaneClient, name: str, output: str, image_names: Mapping[str, list[str]]
) -> None:
    """Show a job again and again: in place on a terminal, else one after the other."""
    if output == "json" or not show.on_terminal():
        async for status in follow.changes(client, name):
            if status is None:
                click.echo(show.printable(f"job {name}: gone"), err=True)
            elif output == "json":
                click.echo(msgspec.json.encode(status).decode())
            else:
                _print_status(status, image_names)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        async for status in follow.changes(client, name):
            if status is None:
                live.update(Text(f"job {show.printable(name)}: gone"), refresh=True)
                return
            lines = _head_lines(status, image_names)
            head = Text("\n".join(show.printable(line) for line in lines))
            drawn = show.rich_table(_TASK_COLUMNS, _task_rows(status))
            live.update(Group(head, drawn), refresh=True)
