"""The root command."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import accounts, host, inside, service, tasks
from agent.cli import image as images
from agent.cli import resize as sizes
from agent.cli import volume as volumes
from agent.cli.program import run_program


@click.group()
@click.option("--config", type=click.Path(path_type=Path), help="Instead of /etc/twine/agent.toml.")
@click.version_option(package_name="twine-cluster", prog_name="twine-agent")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Run tasks on this machine from btrfs images, as systemd units."""
    context.obj = config


_COMMANDS = (
    *(tasks.run, tasks.ps, tasks.show_task, tasks.top, tasks.logs, tasks.restart, tasks.stop),
    inside.exec_task,
    sizes.resize,
    *(host.facts, images.images, images.image, host.events, host.profile),
    *(accounts.gc, accounts.fsck, volumes.volume),
    *(service.serve, service.join, service.install, service.uninstall, service.config_group),
)
for _command in _COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Run the command line."""
    run_program(cli)
