"""`twinectl entitlement`."""

from __future__ import annotations

import click

from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option


@click.group()
def entitlement() -> None:
    """Who may use how many machines, of which types, under which host profile."""


@entitlement.command("create")
@click.argument("name")
@click.option("--machines", required=True, type=click.IntRange(1, 1_000_000), help="Quota.")
@click.option("--type", "types", metavar="T", multiple=True, help="Only these types; repeat.")
@click.option("--host-profile", default="base", show_default=True, help="What its machines run.")
@click.option("--business-unit", default="", help="Who pays.")
@output_option
@click.pass_obj
def entitlement_create(
    target: Target,
    name: str,
    machines: int,
    types: tuple[str, ...],
    host_profile: str,
    business_unit: str,
    output: str,
) -> None:
    """Create an entitlement, or change the one that has this NAME."""
    spec = EntitlementSpec(
        machines=machines,
        machine_types=list(types),
        host_profile=host_profile,
        business_unit=business_unit,
    )
    found: EntitlementView = target.ask(lambda client: client.put_entitlement(name, spec))
    line = f"entitlement {name}: up to {machines} machine(s), profile {host_profile}"
    show.emit(output, found, lambda: click.echo(show.printable(line)))


@entitlement.command("list")
@output_option
@click.pass_obj
def entitlement_list(target: Target, output: str) -> None:
    """Show all entitlements and the machines that they hold."""
    found: Entitlements = target.ask(lambda client: client.list_entitlements())
    rows = [
        (
            view.record.name,
            f"{len(view.held)}/{view.record.spec.machines}",
            ",".join(view.record.spec.machine_types) or "(any)",
            view.record.spec.host_profile,
            view.record.spec.business_unit or "-",
            ",".join(view.jobs) or "-",
            ",".join(view.held) or "-",
        )
        for view in found.entitlements
    ]
    columns = ("entitlement", "held", "types", "profile", "business unit", "jobs", "machines")
    show.emit(output, found, lambda: show.table(columns, rows))


@entitlement.command("delete")
@click.argument("name")
@output_option
@click.pass_obj
def entitlement_delete(target: Target, name: str, output: str) -> None:
    """Remove an entitlement that has no jobs."""
    target.ask(lambda client: client.delete_entitlement(name))
    line = f"entitlement {name}: removed"
    show.emit(output, {"deleted": name}, lambda: click.echo(show.printable(line)))
