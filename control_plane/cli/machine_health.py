"""`twinectl machine held-back` and `confirm-down`: what silence means is in doubt."""

from __future__ import annotations

import click

from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.cli import show
from control_plane.cli.machines import chosen, scope_option
from control_plane.cli.program import Target
from control_plane.cli.show import output_option


@click.command("held-back")
@output_option
@click.pass_obj
def machine_held_back(target: Target, output: str) -> None:
    """Show silent machines that are not taken for dead yet, and why."""
    found: HeldBackMachines = target.ask(lambda client: client.held_back_machines())
    rows = [
        (
            held.machine,
            held.state.value,
            show.duration(held.silent_s),
            held.part or "-",
            show.duration(held.left_s),
            held.reason,
        )
        for held in found.machines
    ]
    columns = ("machine", "state", "silent", "part", "left", "reason")
    show.emit(output, found, lambda: show.table(columns, rows))


@click.command("confirm-down")
@click.argument("names", nargs=-1)
@scope_option
@click.option("--reason", required=True, help="How you know; shown with the machine.")
@output_option
@click.pass_obj
def machine_confirm_down(
    target: Target, names: tuple[str, ...], scopes: tuple[str, ...], reason: str, output: str
) -> None:
    """Say that silent machines are down: their tasks start elsewhere now.

    Machines that answer are left out. If the others are only cut off, their tasks run twice
    until they are back.
    """
    machines, scope = chosen(names, scopes)
    wish = ConfirmDown(machines=machines, scope=scope, reason=reason)
    found: ConfirmedDown = target.ask(lambda client: client.confirm_down(wish))
    line = f"{len(found.machines)} machine(s) confirmed down: {', '.join(found.machines)}"
    show.emit(output, found, lambda: click.echo(show.printable(line)))
