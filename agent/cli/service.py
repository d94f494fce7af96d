"""Commands that install and run the agent."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import click
import msgspec

from agent import api
from agent.cli import show
from agent.cli.program import call
from agent.config import load, load_with_origins


@click.command()
@click.pass_obj
def serve(config_path: Path | None) -> None:
    """Run the agent (systemd does this: twine-agent.service)."""
    from agent.cli.serving import serve as run

    run(config_path)


@click.command()
@click.option("--once", is_flag=True, help="Print the tasks that still run, without waiting.")
@click.pass_obj
def leave(config_path: Path | None, once: bool) -> None:
    """End all tasks because the host is going down (systemd does this: twine-leave.service).

    If it does not go down, they start again after 15 minutes.
    """
    printed: list[str] | None = None
    while True:
        running = call(config_path, lambda client: client.leave())
        if running != printed:
            click.echo(f"still running: {', '.join(running)}" if running else "no task runs")
        printed = running
        if once or not running:
            return
        time.sleep(1.0)


@click.command()
@click.argument("url")
@click.option("--token", required=True, help="From `twinectl token create`; valid for one use.")
@click.option("--ca-hash", required=True, help="Pin of the control plane's authority.")
@click.option(
    "--name", default=socket.gethostname, help="Name of the machine; default: the host name."
)
@click.option("--address", required=True, help="HOST:PORT at which the agent is reachable.")
@click.option("--region", default="local", show_default=True)
@click.option("--datacenter", default="dc1", show_default=True)
@click.option("--msb", default="msb1", show_default=True, help="Main switch board, a fault domain.")
@click.option("--row", default="row1", show_default=True)
@click.option("--rack", default="rack1", show_default=True)
@click.option("--machine-type", default="small", show_default=True)
@click.pass_obj
def join(config_path: Path | None, /, url: str, **options: str) -> None:
    """Make this host a machine of the region behind the control plane at URL."""
    from agent.host.facts import FactsReader
    from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation, write_location
    from agent.machine.real import real_machine

    config = load(config_path)
    name = options["name"]
    location = api.Location(
        **{k: options[k] for k in ("region", "datacenter", "msb", "row", "rack")}
    )
    candidate = CandidateIdentity(
        machine=name,
        address=options["address"],
        facts=FactsReader(real_machine(), config.state_dir).read(name),
        location=location,
        machine_type=options["machine_type"],
    )
    identity = HostIdentity(Path(config.state_dir) / "identity")
    invitation = Invitation(url, options["token"], options["ca_hash"])
    joined = asyncio.run(identity.join(invitation, candidate))
    write_location(joined.recorded or candidate)
    click.echo(f"{joined.machine} joined {joined.control_plane_url}")


@click.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("/"),
    help="Root of an image, to install there.",
)
@click.option("--now", is_flag=True, help="Also enable and start the service.")
def install(root: Path, now: bool) -> None:
    """Put unit files, group and configuration in place."""
    from agent.host.install import install as install_files
    from agent.machine.process import HostProcesses

    for path in install_files(root):
        click.echo(path)
    if now:
        processes = HostProcesses()
        processes.run(["systemd-sysusers"])
        processes.run(["systemctl", "daemon-reload"])
        processes.run(["systemctl", "enable", "sidekick-resume.service"])
        processes.run(["systemctl", "enable", "--now", "sidekick-verify.timer"])
        processes.run(["systemctl", "enable", "--now", "twine-agent.service"])
        click.echo("twine-agent.service is enabled and runs")


@click.command()
@click.option(
    "--purge", is_flag=True, help="Also remove images, volumes, identity and configuration."
)
@click.pass_obj
def uninstall(config_path: Path | None, purge: bool) -> None:
    """Remove the files of `install`; refused while tasks are on this host.

    Restores the settings of a host profile. The program itself stays: remove it with the tool
    that installed it (apt, pip, rm).
    """
    from agent.host.uninstall import uninstall as uninstall_files
    from agent.machine.real import real_machine

    config = load(config_path)
    state, run = Path(config.state_dir), Path(config.run_dir)
    gone = uninstall_files(Path("/"), state, run, real_machine(), config.sidekick, purge=purge)
    for path in gone:
        click.echo(path)


@click.group("config", invoke_without_command=True)
@click.pass_context
def config_group(context: click.Context) -> None:
    """Print the configuration in force, as JSON."""
    if context.invoked_subcommand is None:
        show.json(load(context.obj))


@config_group.command("show")
@click.option("--origin", is_flag=True, help="Also show the file that sets each field.")
@show.output_option
@click.pass_obj
def show_config(config_path: Path | None, origin: bool, output: str) -> None:
    """Show the configuration in force: agent.toml, then the files of agent.toml.d/ by name."""
    sources = load_with_origins(config_path)
    fields = msgspec.to_builtins(sources.config)
    from_ = {name: str(sources.origins.get(name, "default")) for name in fields}
    if output == "json":
        with_origin = {n: {"value": v, "origin": from_[n]} for n, v in fields.items()}
        return show.json(with_origin if origin else fields)
    rows = [(n, msgspec.json.encode(v).decode(), from_[n]) for n, v in fields.items()]
    if origin:
        return show.table(("FIELD", "VALUE", "ORIGIN"), rows)
    return show.table(("FIELD", "VALUE"), [row[:2] for row in rows])
