"""`twine-agent`: serve, and drive the agent of this host without any control plane."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent import api
from agent.config import load, local_socket
from agent.errors import InvalidInput, NotFound, TwineError
from agent.wire import options
from agent.wire.quantities import SIZE, about_size, quantity_of

if TYPE_CHECKING:
    from agent.client import AgentClient

output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Form of output."
)


def main() -> None:
    """Run the command line; every failure on purpose is one message and an exit code."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(64)
    except TwineError as e:
        click.echo(f"twine-agent: {_printable(str(e))}", err=True)
        for error in e.errors:
            click.echo(f"  {error.field}: {error.reason}", err=True)
        if e.hint:
            click.echo(f"  try: {_printable(e.hint)}", err=True)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.exit(0)


@click.group()
@click.option("--config", type=click.Path(path_type=Path), help="Instead of /etc/twine/agent.toml.")
@click.version_option(package_name="twine-cluster", prog_name="twine-agent")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Run tasks on this machine from btrfs images, as systemd units."""
    context.obj = config


@cli.command()
@click.pass_obj
def serve(config_path: Path | None) -> None:
    """Run the agent (systemd does this: twine-agent.service)."""
    from agent import daemon
    from agent.log import configure

    config = load(config_path)
    configure("twine-agent", config.log_level)
    try:
        asyncio.run(daemon.serve(config))
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, TwineError):
                raise error from group
        raise


def _call(config_path: Path | None, ask: Callable[[AgentClient], Awaitable[Any]]) -> Any:
    from agent.client import AgentClient

    async def run() -> Any:
        async with AgentClient(local_socket(load(config_path))) as client:
            return await ask(client)

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        raise click.Abort from None


@cli.command()
@click.argument("name")
@click.option("--image", required=True, help="Digest, or a root file system as .tar[.gz|.zst].")
@click.option("-e", "--env", multiple=True, metavar="K=V", help="Environment variable.")
@click.option(
    "--memory", type=options.size(), default="256MiB", show_default=True, help="48MiB, 1.5GiB, …"
)
@click.option("--cores", type=options.cores(), help="Most CPUs: 0.5, 2, 500m.")
@click.option("--port", type=int, help="Probe this port over HTTP; healthy once it answers.")
@click.option("--path", default="/", show_default=True, help="Path of the probe.")
@click.option(
    "--start-period",
    type=options.seconds(),
    default="30s",
    show_default=True,
    help="How long it may take until the probe answers.",
)
@click.option(
    "--restart",
    type=click.Choice([w.value for w in api.RestartWhen]),
    default="always",
    show_default=True,
)
@click.option("--entitlement", default="local", show_default=True, help="Slice it runs in.")
@click.option("--wait/--no-wait", default=True, help="Wait until it runs (and is healthy).")
@click.argument("command", nargs=-1, required=True)
@click.pass_obj
def run(config_path: Path | None, /, name: str, command: tuple[str, ...], **given: Any) -> None:
    """Start task NAME: COMMAND in a snapshot of an image. Put -- before the command."""
    probe = None
    if given["port"]:
        probe = api.Probe(
            port=given["port"], path=given["path"], start_period_s=given["start_period"]
        )
    wait = given["wait"]

    async def start(client: AgentClient) -> api.TaskStatus:
        spec = api.TaskSpec(
            generation=time.time_ns() // 1_000_000,
            image=await _image(client, given["image"]),
            command=list(command),
            environment=dict(_pair(e) for e in given["env"]),
            entitlement=given["entitlement"],
            limits=api.Limits(memory_max_bytes=int(given["memory"]), cpu_max_cores=given["cores"]),
            restart=api.RestartPolicy(when=api.RestartWhen(given["restart"])),
            probe=probe,
        )
        events = await client.get_events(0)
        status = await client.put_task(name, _checked(spec))
        return await _follow(client, name, events.latest) if wait else status

    status = _call(config_path, start)
    click.echo(f"{status.task_id}: {status.state}, {status.health}. {status.reason}".rstrip(". "))
    if wait and not _as_asked(status):
        sys.exit(1)


def _as_asked(status: api.TaskStatus) -> bool:
    """Return whether a task runs and is not broken, or has done what it was to do once."""
    if status.state is api.TaskState.STOPPED and status.last_exit is not None:
        return status.last_exit.result == "success"
    return status.state is api.TaskState.RUNNING and status.health is not api.Health.UNHEALTHY


async def _follow(client: AgentClient, name: str, after: int) -> api.TaskStatus:
    """Wait until a task runs with a verdict on its health, or cannot."""
    while True:
        status = await client.get_task(name)
        if status.state is api.TaskState.RUNNING and status.health is not api.Health.UNKNOWN:
            return status
        if status.state in (api.TaskState.FAILED, api.TaskState.STOPPED, api.TaskState.BACKOFF):
            return status
        after = (await client.get_events(after, wait_s=10)).latest


async def _image(client: AgentClient, image: str) -> str:
    if image.startswith("sha256:"):
        return image
    path = Path(image)
    if not path.is_file():
        raise InvalidInput(f"{image!r} is neither a digest nor a file")
    click.echo(f"reading {image}", err=True)
    digest = await asyncio.to_thread(_digest_of, path)
    info = await client.put_image(digest, api.ImageFormat.TAR, _chunks(path))
    click.echo(f"image {info.digest}", err=True)
    return info.digest


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, 1 << 20):
            yield chunk


def _checked(spec: api.TaskSpec) -> api.TaskSpec:
    """Return the specification after the same checks that the server makes."""
    from agent.wire.routes import decode_json

    checked = decode_json(msgspec.json.encode(spec), api.TaskSpec, "the task")
    assert isinstance(checked, api.TaskSpec)
    return checked


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise InvalidInput(f"--env {text!r} is not NAME=VALUE")
    return name, value


@cli.command()
@output
@click.pass_obj
def ps(config_path: Path | None, output: str) -> None:
    """Show all tasks of this machine."""
    tasks = _call(config_path, lambda c: c.list_tasks())
    if output == "json":
        return _json(tasks)
    rows = [
        (
            t.task_id,
            str(t.state),
            str(t.health),
            str(t.restarts),
            _age(t.started_at),
            t.entitlement,
            t.reason,
        )
        for t in tasks.tasks
    ]
    return _table(("TASK", "STATE", "HEALTH", "RESTARTS", "AGE", "ENTITLEMENT", "REASON"), rows)


@cli.command()
@click.argument("name")
@click.option("--wait/--no-wait", default=True, help="Wait until nothing of it is left.")
@click.pass_obj
def stop(config_path: Path | None, name: str, wait: bool) -> None:
    """Stop task NAME and remove what it left on the machine.

    A task of a control plane comes back as soon as that hears of it: stop its job instead.
    """

    async def end(client: AgentClient) -> str:
        after = (await client.get_events(0)).latest
        leaving = await client.delete_task(name)
        while wait:
            try:
                now = await client.get_task(name)
            except NotFound:
                return "gone"
            if now.generation != leaving.generation:
                return f"stopped, and wanted again by its owner (generation {now.generation})"
            after = (await client.get_events(after, wait_s=10)).latest
        return "stopping"

    click.echo(f"{name}: {_call(config_path, end)}")


@cli.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on with what it writes from now on.")
@click.option("--tail", type=int, help="Only the last lines.")
@click.option("--since", help="Seconds since 1970.")
@click.pass_obj
def logs(
    config_path: Path | None, name: str, follow: bool, tail: int | None, since: str | None
) -> None:
    """Print what task NAME wrote."""

    async def read(client: AgentClient) -> None:
        async for chunk in client.task_logs(name, follow=follow, tail=tail, since=since):
            sys.stdout.write(_printable(chunk.decode(errors="replace")))
            sys.stdout.flush()

    _call(config_path, read)


@cli.command()
@output
@click.pass_obj
def facts(config_path: Path | None, output: str) -> None:
    """Show what this machine has."""
    found = _call(config_path, lambda c: c.get_machine())
    if output == "json":
        return _json(found)
    return _table(
        ("FACT", "VALUE"), [(k, _fact(k, v)) for k, v in msgspec.to_builtins(found).items()]
    )


def _fact(name: str, value: Any) -> str:
    return about_size(value) if quantity_of(name) is SIZE else str(value)


@cli.command()
@output
@click.pass_obj
def images(config_path: Path | None, output: str) -> None:
    """Show the images on this machine."""
    found = _call(config_path, lambda c: c.list_images())
    if output == "json":
        return _json(found)
    rows = [
        (i.digest, str(i.format), about_size(i.stream_bytes), ", ".join(i.tasks) or "-")
        for i in found.images
    ]
    return _table(("IMAGE", "FORMAT", "SIZE", "TASKS"), rows)


@cli.command()
@click.argument("url")
@click.option("--token", required=True, help="From `twinectl token create`; good for one use.")
@click.option("--ca-hash", required=True, help="Pin of the control plane's authority.")
@click.option("--name", default=socket.gethostname, help="Name of the machine; the host name.")
@click.option("--address", required=True, help="HOST:PORT where the agent is reached.")
@click.option("--region", default="local")
@click.option("--datacenter", default="dc1")
@click.option("--msb", default="msb1")
@click.option("--row", default="row1")
@click.option("--rack", default="rack1")
@click.option("--machine-type", default="small")
@click.pass_obj
def join(config_path: Path | None, /, url: str, **options: str) -> None:
    """Make this host a machine of the region behind the control plane at URL."""
    from agent.daemon import real_machine
    from agent.services.facts import Facts
    from agent.services.identity import Candidate, HostIdentity, Invitation

    config = load(config_path)
    name = options["name"]
    location = api.Location(
        **{k: options[k] for k in ("region", "datacenter", "msb", "row", "rack")}
    )
    candidate = Candidate(
        machine=name,
        address=options["address"],
        facts=Facts(real_machine(), config.state_dir).read(name),
        location=location,
        machine_type=options["machine_type"],
    )
    identity = HostIdentity(Path(config.state_dir) / "identity")
    invitation = Invitation(url, options["token"], options["ca_hash"])
    joined = asyncio.run(identity.join(invitation, candidate))
    click.echo(f"{joined.machine} joined {joined.control_plane_url}")


@cli.command()
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), help="Of an image.")
@click.option("--now", is_flag=True, help="Enable and start the service, too.")
def install(root: Path, now: bool) -> None:
    """Put unit files, group and configuration in place."""
    from agent.machine.process import HostProcesses
    from agent.services.install import install as put

    for path in put(root):
        click.echo(path)
    if now:
        processes = HostProcesses()
        processes.run(["systemd-sysusers"])
        processes.run(["systemctl", "daemon-reload"])
        processes.run(["systemctl", "enable", "sidekick-resume.service"])
        processes.run(["systemctl", "enable", "--now", "twine-agent.service"])
        click.echo("twine-agent.service is enabled and runs")


@cli.command("config")
@click.pass_obj
def show_config(config_path: Path | None) -> None:
    """Print the configuration in force, as JSON."""
    _json(load(config_path))


def _json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    cells = [head, *(tuple(_printable(c) for c in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        text = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))
        click.echo(text.rstrip())


def _age(since: float | None) -> str:
    if since is None:
        return "-"
    seconds = max(0, int(time.time() - since))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _printable(text: str) -> str:
    """Return text without control characters that could drive a terminal (trust F-86)."""
    if not os.isatty(1) and not os.isatty(2):
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
