"""`twinectl machine duplicates`: hosts that have the identity of another one."""

from __future__ import annotations

import click

from control_plane.api.duplicates import Duplicates
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option


@click.command("duplicates")
@output_option
@click.pass_obj
def machine_duplicates(target: Target, output: str) -> None:
    """List hosts that have the identity of another one: their disk was copied from it.

    Such a host starts no tasks. Join it under a name of its own. Or, if it is to be the machine,
    turn the other one off, and then `twinectl machine forget-duplicate NAME`.
    """
    found: Duplicates = target.ask(lambda client: client.list_duplicates())
    rows = [
        (one.machine, one.address or "-", one.boot_id, one.other_boot_id, show.ago(one.at))
        for one in found.duplicates
    ]
    head = ("machine", "clone at", "its boot", "boot that keeps it", "found")
    show.emit(output, found, lambda: show.table(head, rows))


@click.command("forget-duplicate")
@click.argument("name")
@click.pass_obj
def machine_forget_duplicate(target: Target, name: str) -> None:
    """Check the hosts with the identity of machine NAME again.

    For when one of them is gone: the other one is then the machine, within minutes. While both
    run, the second one is found again.
    """
    target.ask(lambda client: client.forget_duplicate(name))
    click.echo(show.printable(f"machine {name}: its hosts are checked again"))
