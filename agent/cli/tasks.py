"""Commands about tasks."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent import api
from agent.cli import show
from agent.cli.image import resolve_image
from agent.cli.program import call
from agent.cli.show import output_option
from agent.cli.task_options import checked_spec, task_document
from agent.cli.waiting import StatusWatch, is_as_requested
from agent.usage import TaskUsage, Usages
from wire import options
from wire.cpus import cpu_list_text
from wire.errors import InvalidInput
from wire.units import about_size

if TYPE_CHECKING:
    from agent.client import AgentClient


@click.command()
@click.argument("name")
@click.option(
    "--image",
    required=True,
    help="Digest, .tar[.gz|.zst], oci:REGISTRY/…, oci-archive:FILE[:TAG], oci-layout:FOLDER[:TAG].",
)
@click.option("-e", "--env", multiple=True, metavar="K=V", help="Environment variable.")
@click.option(
    "--memory", type=options.size(), default="256MiB", show_default=True, help="48MiB, 1.5GiB, …"
)
@click.option("--cores", type=options.cores(), help="CPU limit: 0.5, 2, 500m.")
@click.option(
    "--port", type=int, help="Probe this port over HTTP; the task is healthy once it answers."
)
@click.option(
    "--listen",
    multiple=True,
    metavar="NAME=PORT",
    help="A port that it may bind; its number is in TWINE_PORT_NAME.",
)
@click.option(
    "--network",
    type=click.Choice([m.value for m in api.NetworkMode]),
    default="host",
    show_default=True,
    help="The host's network, or a private one (docs/network.md).",
)
@click.option(
    "--egress-mbps", type=float, help="Limit of its sending rate; needs --network private."
)
@click.option(
    "--allow-from", multiple=True, metavar="NAME", help="Task or job that may connect to it."
)
@click.option(
    "--unix-sockets",
    is_flag=True,
    help="Allow AF_UNIX in the host's network (docs/network.md).",
)
@click.option(
    "--relax",
    multiple=True,
    type=click.Choice([r.value for r in api.Relaxation]),
    help="Exceptions from its sandbox (docs/security.md); `raw` is for root alone.",
)
@click.option(
    "--credential",
    multiple=True,
    metavar="FILE[=NAME]",
    help="Credential NAME as FILE in its $CREDENTIALS_DIRECTORY (docs/credentials.md).",
)
@click.option("--path", default="/", show_default=True, help="Path of the probe.")
@click.option(
    "--start-period",
    type=options.seconds(),
    default="30s",
    show_default=True,
    help="Time limit until the probe succeeds.",
)
@click.option(
    "--restart",
    type=click.Choice([w.value for w in api.RestartWhen]),
    default="always",
    show_default=True,
)
@click.option(
    "--health-gate",
    type=options.seconds(),
    help="A new version must be healthy within this time, or the host restores the old one.",
)
@click.option("--max-run", type=options.seconds(), help="End it after this time.")
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Further keys of the task as TOML: life, disconnect, … (docs/job-file.md).",
)
@click.option("--entitlement", default="local", show_default=True, help="Slice in which it runs.")
@click.option("--wait/--no-wait", default=True, help="Return when it runs (and is healthy).")
@click.argument("command", nargs=-1)
@click.pass_obj
def run(config_path: Path | None, /, name: str, command: tuple[str, ...], **given: Any) -> None:
    """Start task NAME: COMMAND in a snapshot of an image. Put -- before the command.

    Without a command an OCI image runs its own.
    """
    wait, asked = given["wait"], task_document(given) | {"command": list(command)}

    async def start(client: AgentClient) -> tuple[api.TaskStatus, bool]:
        image = await resolve_image(client, given["image"])
        watch = StatusWatch(client)
        before = await watch.begin(name)
        latest = 0 if before is None else before.generation  # the clock may have been set back
        asked["generation"] = max(time.time_ns() // 1_000_000, latest + 1)
        spec = checked_spec(asked | {"image": image})
        status = await client.put_task(name, spec)
        if not wait:
            return status, True
        status = await watch.wait_settled(name)
        if spec.life.health_gate_s is None:
            return status, is_as_requested(status) and status.generation == spec.generation
        return await watch.wait_for_gate(name, spec, status, first=before is None)

    status, well = call(config_path, start)
    click.echo(f"{status.task_id}: {status.state}, {status.health}. {status.reason}".rstrip(". "))
    if not well:
        if status.generation == asked["generation"] and is_as_requested(status):
            click.echo(f"{name}: it did not run for the whole time of its health gate", err=True)
        sys.exit(1)


@click.command()
@output_option
@click.pass_obj
def ps(config_path: Path | None, output: str) -> None:
    """Show all tasks of this machine."""
    tasks = call(config_path, lambda c: c.list_tasks())
    rows = [
        (
            t.task_id,
            str(t.state),
            str(t.health),
            str(t.restarts),
            show.age(t.started_at),
            t.entitlement,
            t.reason,
        )
        for t in tasks.tasks
    ]
    head = ("TASK", "STATE", "HEALTH", "RESTARTS", "AGE", "ENTITLEMENT", "REASON")
    show.listing(output, tasks, head, rows)


@click.command()
@click.argument("name")
@click.option("--wait/--no-wait", default=True, help="Return when nothing of it is left.")
@click.pass_obj
def stop(config_path: Path | None, name: str, wait: bool) -> None:
    """Stop task NAME and remove it from the machine.

    The control plane starts a task of a job again: stop the job instead.
    """

    async def end(client: AgentClient) -> str:
        watch = StatusWatch(client)
        await watch.begin(name)
        leaving = await client.delete_task(name)
        return await watch.wait_removed(name, leaving.generation) if wait else "stopping"

    click.echo(f"{name}: {call(config_path, end)}")


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Continue with new output.")
@click.option("--tail", type=int, help="Only the last lines.")
@click.option(
    "--since", type=options.seconds(), metavar="DURATION", help="Only of the last 90s, 10m, …"
)
@click.option("-p", "--previous", is_flag=True, help="Only of the previous run.")
@click.pass_obj
def logs(
    config_path: Path | None,
    name: str,
    follow: bool,
    tail: int | None,
    since: float | None,
    previous: bool,
) -> None:
    """Print the output of task NAME, also after its removal, while the journal has it.

    With --previous: the output of the run before the present one, or, if it does not run, of its
    last run. A file or a pipe gets it byte for byte; a terminal gets no control characters.
    """
    if follow and previous:
        raise InvalidInput("--follow and --previous exclude each other: the previous run has ended")

    start = None if since is None else f"{time.time() - since:.3f}"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # chunks end anywhere

    async def read(client: AgentClient) -> None:
        async for chunk in client.task_logs(
            name, follow=follow, tail=tail, since=start, previous=previous
        ):
            if os.isatty(1):
                sys.stdout.write(show.printable(decoder.decode(chunk)))
                sys.stdout.flush()
            else:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

    call(config_path, read)


@click.command()
@click.argument("name")
@click.option("--wait/--no-wait", default=True, help="Return when it runs again (and is healthy).")
@click.pass_obj
def restart(config_path: Path | None, name: str, wait: bool) -> None:
    """Stop task NAME and start it again.

    For a task of a job this is one more start on this host; `twinectl job restart` restarts the
    tasks of a job within its budget.
    """

    async def again(client: AgentClient) -> api.TaskStatus:
        watch = StatusWatch(client)
        before = await watch.begin(name)
        status = await client.restart_task(name)
        return await watch.wait_settled(name, before) if wait else status

    status = call(config_path, again)
    click.echo(f"{status.task_id}: {status.state}, {status.health}. {status.reason}".rstrip(". "))
    if wait and not is_as_requested(status):
        sys.exit(1)


@click.command("show")
@click.argument("name")
@click.option(
    "--unit", "unit_wanted", is_flag=True, help="Show every property of its unit instead."
)
@output_option
@click.pass_obj
def show_task(config_path: Path | None, name: str, unit_wanted: bool, output: str) -> None:
    """Show one task: its state, its usage, and how it ended last.

    With --unit: every property of its systemd unit, as requested and as in force.
    """
    if unit_wanted:
        unit = call(config_path, lambda client: client.get_unit(name))
        properties = [(p.name, p.wanted, p.in_force) for p in unit.properties]
        return show.listing(output, unit, ("PROPERTY", "WANTED", "IN FORCE"), properties)

    async def ask(client: AgentClient) -> tuple[api.TaskStatus, TaskUsage | None]:
        status = await client.get_task(name)
        usage = await client.get_usage()
        return status, next((u for u in usage.tasks if u.task_id == name), None)

    status, usage = call(config_path, ask)
    rows = _rows_of(status) + ([] if usage is None else _rows_of_usage(usage))
    return show.listing(output, {"task": status, "usage": usage}, ("WHAT", "VALUE"), rows)


def _rows_of(status: api.TaskStatus) -> list[tuple[str, str]]:
    return [
        ("state", str(status.state)),
        ("health", str(status.health)),
        ("reason", status.reason or "-"),
        ("image", status.image),
        ("job", status.job or "-"),
        ("entitlement", status.entitlement),
        ("generation", f"{status.generation} (epoch {status.epoch})"),
        ("unit", status.unit),
        ("addresses", ", ".join(status.addresses) or "the host's"),
        ("own CPUs", cpu_list_text(status.cpus) or "none"),
        ("started", _moment(status.started_at)),
        ("restarts", str(status.restarts)),
        ("next start", _moment(status.next_start_at)),
        ("last end", _ending(status.last_exit)),
    ]


def _rows_of_usage(usage: TaskUsage) -> list[tuple[str, str]]:
    memory = f"{about_size(usage.memory_bytes)}, at most {about_size(usage.memory_peak_bytes)}"
    disk = f"{about_size(usage.read_bytes)} read, {about_size(usage.written_bytes)} written"
    pressures = (
        f"cpu {usage.cpu_pressure:.0%}, memory {usage.memory_pressure:.0%}, disk "
        f"{usage.io_pressure:.0%} over the last 10 s"
    )
    return [
        ("cpu", f"{usage.cpu_s:.1f} s, throttled for {usage.throttled_s:.1f} s"),
        ("memory", f"{memory}, {usage.oom_kills} OOM kills"),
        ("disk", disk),
        ("processes", str(usage.processes)),
        ("waits for", pressures),
    ]


def _moment(at: float | None) -> str:
    return "-" if at is None else f"{show.when(at)} ({show.age(at)} ago)"


def _ending(end: api.Exit | None) -> str:
    if end is None:
        return "-"
    how = f"exit code {end.code}" if end.code is not None else f"signal {end.signal or '-'}"
    return f"{show.when(end.at)}: {end.result}, {how}"


@click.command()
@click.option(
    "--interval", type=options.seconds(), default="2s", show_default=True, help="Between readings."
)
@output_option
@click.pass_obj
def top(config_path: Path | None, interval: float, output: str) -> None:
    """Show the usage of each task, the busiest first.

    Rates come from two readings, `--interval` apart.
    """

    async def read(client: AgentClient) -> tuple[Usages, Usages]:
        first = await client.get_usage()
        await asyncio.sleep(interval)
        return first, await client.get_usage()

    first, last = call(config_path, read)
    took_s = max(last.at_boot_s - first.at_boot_s, 1e-3)
    before = {u.task_id: u for u in first.tasks}
    rates = [(_rates(before.get(u.task_id, u), u, took_s), u) for u in last.tasks]
    rows = [
        (
            u.task_id,
            f"{cores:.2f}",
            f"{u.cpu_pressure:.0%}",
            about_size(u.memory_bytes),
            about_size(u.memory_peak_bytes),
            f"{about_size(int(read))}/s",
            f"{about_size(int(written))}/s",
            str(u.processes),
        )
        for (cores, read, written), u in sorted(rates, key=lambda r: (-r[0][0], r[1].task_id))
    ]
    head = ("TASK", "CPUS", "WAITS", "MEMORY", "PEAK", "READ", "WRITTEN", "PROCESSES")
    show.listing(output, last, head, rows)


def _rates(before: TaskUsage, after: TaskUsage, took_s: float) -> tuple[float, float, float]:
    """Return CPUs in use, bytes read and written a second; a restart counts from zero."""
    if after.cpu_s < before.cpu_s:
        before = TaskUsage(task_id=after.task_id)
    return (
        (after.cpu_s - before.cpu_s) / took_s,
        max(0, after.read_bytes - before.read_bytes) / took_s,
        max(0, after.written_bytes - before.written_bytes) / took_s,
    )
