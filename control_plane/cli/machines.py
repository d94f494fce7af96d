"""`twinectl machine` and `token`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from control_plane.api.inventory import Drain, Lend, MachineScope, Records, Revoke, Undrain
from control_plane.api.machines import (
    EventKind,
    MachineRecord,
    MachineState,
    MachineView,
    TokenRequest,
)
from control_plane.cli import show
from control_plane.cli.machine_text import (
    LEVELS,
    at_text,
    identity_warning,
    open_events,
    print_machine,
)
from control_plane.cli.program import Target, options, shows_answer
from wire.errors import InvalidInput
from wire.options import former_names, nonempty_name, seconds

_KINDS = (EventKind.MAINTENANCE, EventKind.DECOMMISSION, EventKind.REFRESH)
_SCOPE = (*LEVELS, "machine_type", "entitlement", "cluster", "where")


@click.group()
def machine() -> None:
    """The region's machines."""


_filters = options(
    *(click.option(f"--{level}", metavar="NAME", help=f"In this {level}.") for level in LEVELS),
    click.option("--type", "machine_type", metavar="T", help="Of this machine type."),
    click.option("--cluster", metavar="NAME", help="Of this historic cluster."),
    click.option("--entitlement", metavar="E", help="Assigned to this entitlement."),
    click.option("--free", is_flag=True, help="In the free pool."),
    click.option("--state", type=click.Choice([s.value for s in MachineState])),
    click.option("--unavailable", is_flag=True, help="Down, or with an open event."),
    click.option(
        "--where",
        metavar="REQUIREMENT",
        help='A requirement as in jobs: "gpus >= 4 and rack not in (r1, r2)".',
    ),
)
"""The options that choose machines."""


@machine.command("list")
@_filters
@shows_answer
def machine_list(
    target: Target,
    /,
    output: str,
    free: bool,
    state: str | None,
    unavailable: bool,
    **given: str | None,
) -> None:
    """Show machines; all filters that are given must hold."""
    if free and given["entitlement"]:
        raise click.UsageError("a machine of an entitlement is not free: give only one of both")
    if free:
        given["entitlement"] = ""
    values: dict[str, Any] = {
        **given,
        "state": MachineState(state) if state else None,
        "unavailable": True if unavailable else None,
    }
    scope = MachineScope(**values)
    found = target.ask(lambda client: client.list_machines(scope))
    columns = (
        *("machine", "state", "ready", "type", "datacenter", "msb"),
        *("entitlement", "profile", "tasks", "seen ago", "events"),
    )
    show.emit(output, found, lambda: show.table(columns, map(_row, found.machines)))
    if output == "table":
        show.progress(_summary([view.record for view in found.machines]))


def _row(view: MachineView) -> tuple[object, ...]:
    record = view.record
    return (
        record.machine,
        record.state.value + (", held back" if view.health else "") + identity_warning(view),
        "yes" if view.ready else "no",
        record.machine_type,
        record.location.datacenter,
        record.location.msb,
        record.entitlement or "(free)",
        record.profile or "-",
        len(view.tasks),
        show.duration(view.last_seen_s),
        ",".join(event.kind.value for event in open_events(record)) or "-",
    )


def _summary(records: Sequence[MachineRecord]) -> str:
    states = Counter(record.state.value for record in records)
    free = sum(1 for record in records if not record.entitlement)
    owners = len({record.entitlement for record in records if record.entitlement})
    parts = [f"{count} {state}" for state, count in sorted(states.items(), reverse=True)]
    parts += [f"{free} free", f"{len(records) - free} in {owners} entitlement(s)"]
    parts += [f"{lent} on loan"] if (lent := sum(1 for r in records if r.loan)) else []
    return f"{len(records)} machine(s): {', '.join(parts)}"


@machine.command("show")
@click.argument("name")
@shows_answer
def machine_show(target: Target, name: str, output: str) -> None:
    """Show one machine: hardware, place, tasks, and past events."""
    target.show(output, lambda client: client.get_machine(name), print_machine)


scope_option = click.option(
    "--scope",
    "scopes",
    metavar="KEY=VALUE",
    multiple=True,
    help=f"All machines with this {', '.join(_SCOPE)}; repeat to narrow.",
)
chosen_machines = options(click.argument("names", nargs=-1), scope_option)
"""The argument and the option that `chosen` reads."""
duration_option = click.option(
    "--duration",
    "duration_s",
    type=seconds(),
    help="Duration of the work, from the deadline on.",
)


def _scope(settings: Sequence[str]) -> MachineScope | None:
    """Return the scope that --scope describes."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = {"type": "machine_type", "dc": "datacenter"}.get(key, key)
        if not equals or key not in _SCOPE or key in values:
            raise InvalidInput(
                f"cannot use --scope {setting!r}", hint=f"KEY=VALUE with one of {', '.join(_SCOPE)}"
            )
        values[key] = value
    return MachineScope(**values) if values else None


def chosen(names: Sequence[str], scopes: Sequence[str]) -> tuple[list[str], MachineScope | None]:
    """Return the machines of a command; neither names nor a scope is wrong usage."""
    if not names and not scopes:
        raise click.UsageError("name machines, or give --scope")
    return list(names), _scope(scopes)


def _print_plans(found: Records) -> None:
    rows = [
        (
            record.machine,
            record.entitlement or "(free)",
            event.kind.value if event else "-",
            at_text(event.start) if event else "-",
            at_text(event.deadline) if event and event.deadline is not None else "-",
            event.reason if event else "-",
        )
        for record in found.machines
        for event in (open_events(record) or (None,))
    ]
    show.table(("machine", "entitlement", "event", "from", "deadline", "reason"), rows)


@machine.command("drain")
@chosen_machines
@click.option("--reason", required=True, help="Shown with the machine and its tasks.")
@click.option(
    "--kind", type=click.Choice([k.value for k in _KINDS]), default="maintenance", show_default=True
)
@click.option(
    "--start",
    "start_in_s",
    type=seconds(),
    default="0s",
    help="When tasks begin to move, from now.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=seconds(),
    help="Time at which the work begins even if tasks still run there.",
)
@duration_option
@click.option(
    "--tasks-survive", is_flag=True, help="Tasks continue to run meanwhile: a switch is replaced."
)
@shows_answer
def machine_drain(
    target: Target,
    /,
    names: tuple[str, ...],
    scopes: tuple[str, ...],
    kind: str,
    output: str,
    **given: Any,
) -> None:
    """Announce that machines will be unavailable: their tasks move, and no new ones start there."""
    machines, scope = chosen(names, scopes)
    request = Drain(machines=machines, scope=scope, kind=EventKind(kind), **given)
    target.show(output, lambda client: client.drain_machines(request), _print_plans)


@machine.command("undrain")
@chosen_machines
@shows_answer
def machine_undrain(
    target: Target, names: tuple[str, ...], scopes: tuple[str, ...], output: str
) -> None:
    """End planned unavailability of machines: they are back, or the work was cancelled."""
    machines, scope = chosen(names, scopes)
    request = Undrain(machines=machines, scope=scope)
    target.show(output, lambda client: client.undrain_machines(request), _print_plans)


@machine.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["csv", "json"]),
    help="Format of the list [default: by its suffix].",
)
@click.option("--dry-run", is_flag=True, help="Only check and count.")
@click.option("--simulated", is_flag=True, help="They have no agents: mark them as up at once.")
@shows_answer
def machine_import(
    target: Target, file: Path, format_: str | None, dry_run: bool, simulated: bool, output: str
) -> None:
    """Bring the region's machines in line with a list, all of it or nothing.

    New machines are down until their agents have joined; known ones get the list's place,
    type, hardware and cluster; machines that are not in the list stay.
    """
    chosen = format_ or ("json" if file.suffix.lower() == ".json" else "csv")
    data = file.read_bytes()
    found = target.ask(
        lambda client: client.import_machines(data, chosen, dry_run=dry_run, simulated=simulated)
    )
    verb = "would be " if found.dry_run else ""
    line = (
        f"{found.added} machine(s) {verb}added, {found.updated} {verb}updated,"
        f" {found.unchanged} unchanged"
    )
    if found.pending:
        line += "; accepted, and the rest is written as soon as the stores answer"
    show.emit(output, found, lambda: click.echo(line))


@machine.command("lend")
@click.argument("name")
@click.option("--to", "borrower", required=True, metavar="E", help="Entitlement that borrows it.")
@click.option(
    "--from",
    "donor",
    type=nonempty_name(),
    metavar="E",
    help="Its present entitlement [default: none, it is free].",
)
@shows_answer
def machine_lend(target: Target, name: str, borrower: str, donor: str | None, output: str) -> None:
    """Give a whole, empty machine to another entitlement for a while."""
    request = Lend(machine=name, borrower=borrower, donor=donor or "")
    found = target.ask(lambda client: client.lend_machine(request))
    line = f"machine {name}: lent to {borrower} by {donor or 'the free pool'}"
    show.emit(output, found, lambda: show.lines(line))


@machine.command("revoke")
@click.argument("names", nargs=-1, required=True)
@click.option(
    "--within",
    type=seconds(),
    default="5m",
    show_default=True,
    help="Time limit, after which its tasks are stopped.",
)
@shows_answer
def machine_revoke(target: Target, names: tuple[str, ...], within: float, output: str) -> None:
    """Revoke loans: the borrower's tasks move away, then the machines return."""
    request = Revoke(machines=list(names), return_within_s=within)
    target.show(output, lambda client: client.revoke_machines(request), _print_plans)


@former_names(machine, "remove")
@machine.command("delete")
@click.argument("name")
@shows_answer
def machine_remove(target: Target, name: str, output: str) -> None:
    """Remove a machine that is free and decommissioned or replaced."""
    target.ask(lambda client: client.remove_machine(name))
    line = f"machine {name}: removed"
    show.emit(output, {"removed": name}, lambda: show.lines(line))


@click.group()
def token() -> None:
    """One-time tokens for hosts to join."""


@token.command("create")
@click.option("--host", required=True, help="The only name with which a host can join by it.")
@click.option("--ttl", type=seconds(), default="10m", show_default=True, help="90s, 10m, 8h, …")
@show.output_choice(default="json")
@click.pass_obj
def token_create(target: Target, host: str, ttl: float, output: str) -> None:
    """Make a token for one host; -o table prints the command to run there."""
    request = TokenRequest(machine=host, ttl_s=ttl)
    made = target.ask(lambda client: client.create_token(request))
    command = (
        f"twine-agent join {made.url} --token {made.token} --ca-hash {made.ca_hash} "
        f"--name {made.machine} --address HOST:7443"
    )
    show.emit(output, made, lambda: show.lines(command))
