"""`twinectl machine held-back`, `confirm-down`, `label`, `duplicates` and `forget-duplicate`."""

from __future__ import annotations

import click

from control_plane.api.health import ConfirmDown
from control_plane.api.inventory import Relabel
from control_plane.cli import show
from control_plane.cli.machine_text import labels_text
from control_plane.cli.machines import chosen, chosen_machines, machine
from control_plane.cli.program import Target, shows_answer
from wire.errors import InvalidInput


@machine.command("held-back")
@shows_answer
def machine_held_back(target: Target, output: str) -> None:
    """Show silent machines that are not marked down yet, and why."""
    found = target.ask(lambda client: client.held_back_machines())
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


@machine.command("confirm-down")
@chosen_machines
@click.option("--reason", required=True, help="Evidence for it; shown with the machine.")
@shows_answer
def machine_confirm_down(
    target: Target, names: tuple[str, ...], scopes: tuple[str, ...], reason: str, output: str
) -> None:
    """Confirm that silent machines are down: their tasks start elsewhere now.

    Machines that answer are skipped. If the others are only cut off, their tasks run twice
    until they are back.
    """
    machines, scope = chosen(names, scopes)
    request = ConfirmDown(machines=machines, scope=scope, reason=reason)
    found = target.ask(lambda client: client.confirm_down(request))
    line = f"{len(found.machines)} machine(s) confirmed down: {', '.join(found.machines)}"
    show.emit(output, found, lambda: show.lines(line))


@machine.command("label")
@chosen_machines
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Set this label.")
@click.option("--remove", metavar="NAME", multiple=True, help="Remove this label.")
@shows_answer
def machine_label(
    target: Target,
    names: tuple[str, ...],
    scopes: tuple[str, ...],
    settings: tuple[str, ...],
    remove: tuple[str, ...],
    output: str,
) -> None:
    """Set and remove labels, which jobs can require: requires = ["label.NAME = VALUE"]."""
    machines, scope = chosen(names, scopes)
    if malformed := [setting for setting in settings if "=" not in setting]:
        raise InvalidInput(f"cannot use --set {malformed[0]!r}", hint="NAME=VALUE")
    labels = dict(setting.split("=", 1) for setting in settings)
    request = Relabel(machines=machines, scope=scope, set=labels, remove=list(remove))
    found = target.ask(lambda client: client.label_machines(request))
    rows = [(record.machine, labels_text(record)) for record in found.machines]
    show.emit(output, found, lambda: show.table(("machine", "labels"), rows))


@machine.command("duplicates")
@shows_answer
def machine_duplicates(target: Target, output: str) -> None:
    """List hosts that have the identity of another one: their disk was copied from it.

    Such a host starts no tasks. Join it under another name. Or, to make it the machine, turn the
    other one off, and then run `twinectl machine forget-duplicate NAME`.
    """
    found = target.ask(lambda client: client.list_duplicates())
    rows = [
        (one.machine, one.address or "-", one.boot_id, one.other_boot_id, show.ago(one.at))
        for one in found.duplicates
    ]
    head = ("machine", "clone at", "its boot", "boot that keeps it", "found")
    show.emit(output, found, lambda: show.table(head, rows))


@machine.command("forget-duplicate")
@click.argument("name")
@click.pass_obj
def machine_forget_duplicate(target: Target, name: str) -> None:
    """Check the hosts with the identity of machine NAME again.

    Use it when one of them is gone: the other one becomes the machine, within minutes. While both
    run, the second one is found again.
    """
    target.ask(lambda client: client.forget_duplicate(name))
    show.lines(f"machine {name}: its hosts are checked again")
