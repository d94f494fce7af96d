"""`twinectl machine` and `token`."""

from __future__ import annotations

import click

from agent.api import MachineFacts
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
