"""The root command."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import accounts, credential, host, inside, service, tasks
from agent.cli import image as images
from agent.cli import resize as sizes
from agent.cli import volume as volumes
from agent.cli.program import run_program
from wire.options import former_names
from wire.pipes import PipedGroup


@click.group(cls=PipedGroup)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Configuration file to use instead of /etc/twine/agent.toml.",
)
@click.version_option(package_name="twine-cluster", prog_name="twine-agent")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Run tasks on this machine from btrfs images, as systemd units."""
    context.obj = config


_COMMANDS = (
    tasks.run,
    tasks.ps,
    tasks.show_task,
    tasks.top,
    tasks.logs,
    tasks.restart,
    tasks.stop,
    inside.exec_task,
    credential.credential,
    sizes.resize,
    host.facts,
    images.image,
    host.events,
    host.profile,
    accounts.gc,
    accounts.fsck,
    volumes.volume,
    service.serve,
    service.leave,
    service.join,
    service.install,
    service.uninstall,
    service.config_group,
)
for _command in _COMMANDS:
    cli.add_command(_command)
former_names(cli, "images")(images.images)


@cli.command("manual")
def manual_() -> None:
    """Print the manual page: `twine-agent manual | man -l -`."""
    from wire.manual import manual

    click.echo(
        manual(cli, "twine-agent", "sidekick(1), twinectl(1), journalctl(1), systemctl(1)"),
        nl=False,
    )


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_(shell: str) -> None:
    """Print the shell's completion script: `source <(twine-agent completion bash)`."""
    from wire.manual import completion

    click.echo(completion(cli, "twine-agent", shell))


def main() -> None:
    """Run the command line."""
    run_program(cli)
