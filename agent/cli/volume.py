"""Commands about volumes: listing, snapshots, removal."""

from __future__ import annotations

import time
from pathlib import Path

import click

from agent.cli import show
from agent.cli.program import call
from agent.cli.show import output_option
from wire.options import former_names
from wire.units import about_size

_entitlement = click.option(
    "--entitlement", default="local", show_default=True, help="Entitlement of the volume."
)


@click.group()
def volume() -> None:
    """Volumes of tasks on this machine (docs/volumes.md)."""


@volume.command("list")
@output_option
@click.pass_obj
def volume_list(config_path: Path | None, output: str) -> None:
    """Show volumes and snapshots: usage, size, and the tasks that use them."""
    answer = call(config_path, lambda c: c.list_volumes())
    rows = [
        (
            v.entitlement or "-",
            v.name,
            v.kind,
            "-" if v.used_bytes is None else about_size(v.used_bytes),
            "-" if v.max_bytes is None else about_size(v.max_bytes),
            ", ".join(v.tasks) or "-",
        )
        for v in answer.volumes
    ]
    head = ("ENTITLEMENT", "VOLUME", "KIND", "USED", "MOST", "TASKS")
    show.listing(output, answer, head, rows)


@volume.command("snapshot")
@click.argument("name")
@click.option("--label", help="Name of the snapshot; default: the time, as 20260101-120000.")
@_entitlement
@click.pass_obj
def volume_snapshot(
    config_path: Path | None, name: str, label: str | None, entitlement: str
) -> None:
    """Make a snapshot of the persistent volume NAME (TASK.VOLUME), and print its name."""
    chosen = label or time.strftime("%Y%m%d-%H%M%S")
    made = call(config_path, lambda c: c.snapshot_volume(entitlement, name, chosen))
    click.echo(made.name)


@former_names(volume, "remove")
@volume.command("delete")
@click.argument("name")
@_entitlement
@click.pass_obj
def volume_remove(config_path: Path | None, name: str, entitlement: str) -> None:
    """Remove the volume or snapshot NAME; refused while a task uses it."""
    call(config_path, lambda c: c.remove_volume(entitlement, name))
    click.echo(f"{name}: removed")
