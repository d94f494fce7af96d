"""`twinectl machine label`: words by which jobs can ask for machines."""

from __future__ import annotations

import click

from control_plane.api.inventory import Records, Relabel
from control_plane.cli import show
from control_plane.cli.machines import chosen, labels_text, scope_option
from control_plane.cli.program import Target
from control_plane.cli.show import output_option
from wire.errors import InvalidInput


@click.command("label")
@click.argument("names", nargs=-1)
@scope_option
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Give this label.")
@click.option("--remove", metavar="NAME", multiple=True, help="Take this label away.")
@output_option
@click.pass_obj
def machine_label(
    target: Target,
    names: tuple[str, ...],
    scopes: tuple[str, ...],
    settings: tuple[str, ...],
    remove: tuple[str, ...],
    output: str,
) -> None:
    """Set and remove labels, for which jobs can ask: requires = ["label.NAME = VALUE"]."""
    machines, scope = chosen(names, scopes)
    if strays := [setting for setting in settings if "=" not in setting]:
        raise InvalidInput(f"cannot use --set {strays[0]!r}", hint="NAME=VALUE")
    labels = dict(setting.split("=", 1) for setting in settings)
    wish = Relabel(machines=machines, scope=scope, set=labels, remove=list(remove))
    found: Records = target.ask(lambda client: client.label_machines(wish))
    rows = [(record.machine, labels_text(record)) for record in found.machines]
    show.emit(output, found, lambda: show.table(("machine", "labels"), rows))
