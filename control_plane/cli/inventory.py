"""`twinectl machine`, `entitlement` and `token`."""

from __future__ import annotations

import click

from agent.api import MachineFacts
from control_plane.api.capacity import Entitlements, EntitlementSpec, EntitlementView
from control_plane.api.machines import Machines, MachineView, Token, TokenRequest
from control_plane.cli import show
from control_plane.cli.program import Seconds, Target
from control_plane.cli.show import output_option


@click.group()
def machine() -> None:
    """The region's machines."""


@machine.command("list")
@output_option
@click.pass_obj
def machine_list(target: Target, output: str) -> None:
    """Show all machines."""
    found: Machines = target.ask(lambda client: client.list_machines())
    rows = [
        (
            view.record.machine,
            view.record.state.value,
            "yes" if view.ready else "no",
            view.record.machine_type,
            view.record.location.datacenter,
            view.record.location.msb,
            view.record.entitlement or "(free)",
            view.record.profile or "-",
            len(view.tasks),
            show.duration(view.last_seen_s),
        )
        for view in found.machines
    ]
    place = ("type", "datacenter", "msb")
    columns = ("machine", "state", "ready", *place, "entitlement", "profile", "tasks", "seen ago")
    show.emit(output, found, lambda: show.table(columns, rows))


@machine.command("show")
@click.argument("name")
@output_option
@click.pass_obj
def machine_show(target: Target, name: str, output: str) -> None:
    """Show one machine: what it has, where it is, what it runs."""
    found: MachineView = target.ask(lambda client: client.get_machine(name))
    show.emit(output, found, lambda: _print_machine(found))


def _print_machine(view: MachineView) -> None:
    record, facts, place = view.record, view.record.facts, view.record.location
    events = [f"{e.kind.value}: {e.reason}" for e in record.unavailability if e.end is None]
    rows = [
        ("state", record.state.value + ("" if view.ready else ", not ready")),
        ("last seen", show.duration(view.last_seen_s) + " ago"),
        ("address", record.address),
        ("type", record.machine_type),
        ("place", f"{place.region}/{place.datacenter}/{place.msb}/{place.row}/{place.rack}"),
        ("entitlement", record.entitlement or "(free pool)"),
        ("profile", f"{record.profile or '-'} ({record.profile_state.value})"),
        ("profile wanted", record.profile_wanted or "-"),
        *(_facts(facts) if facts else [("agent", "has not joined yet")]),
        ("tasks", ", ".join(view.tasks) or "-"),
        *(("unavailable", event) for event in events),
    ]
    show.table(("machine", record.machine), rows)


def _facts(facts: MachineFacts) -> list[tuple[str, str]]:
    return [
        ("cpus", f"{facts.cpus} ({facts.sockets} socket(s), {facts.cpu_model})"),
        ("memory", show.size(facts.memory_bytes)),
        ("disk", f"{show.size(facts.disk_bytes)}, {show.size(facts.disk_free_bytes)} free"),
        ("kernel", facts.kernel),
        ("agent", facts.agent_version),
    ]


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


@click.group()
def token() -> None:
    """One-time tokens with which hosts join."""


@token.command("create")
@click.option("--host", required=True, help="The only name that can join with it.")
@click.option("--ttl", type=Seconds(), default="10m", show_default=True, help="90s, 10m, 8h, …")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="json", show_default=True
)
@click.pass_obj
def token_create(target: Target, host: str, ttl: float, output: str) -> None:
    """Make a token for one host; -o table prints the command to type there."""
    request = TokenRequest(machine=host, ttl_s=ttl)
    made: Token = target.ask(lambda client: client.create_token(request))
    command = (
        f"twine-agent join {made.url} --token {made.token} --ca-hash {made.ca_hash} "
        f"--name {made.machine} --address HOST:7443"
    )
    show.emit(output, made, lambda: click.echo(show.printable(command)))
