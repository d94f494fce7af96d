"""`twinectl capacity`."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from control_plane.api.capacity_report import (
    Amount,
    CapacityReport,
    Fragmentation,
    Line,
    PowerBudget,
)
from control_plane.api.elastic import ElasticReport, LoanView, PoolElasticity, PromiseReport
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from wire.units import about_size

_FREED_SHOWN = 20
_MACHINES_OF = {"type": "types", "datacenter": "datacenters", "msb": "msbs"}


@click.group()
def capacity() -> None:
    """Granted, held, used and remaining capacity."""


@capacity.command("report")
@click.option(
    "--by",
    type=click.Choice(["unit", "entitlement", "type", "datacenter", "msb", "power"]),
    help="One table; without it, a summary of the region.",
)
@shows_answer
def capacity_report(target: Target, by: str | None, output: str) -> None:
    """Show the capacity of the region, of its entitlements, or of its parts."""
    found = target.ask(lambda client: client.get_capacity())
    show.emit(output, found, lambda: _print(found, by))


@capacity.command("elastic")
@click.option("--loans", "one_by_one", is_flag=True, help="Show each machine on loan.")
@shows_answer
def capacity_elastic(target: Target, *, one_by_one: bool, output: str) -> None:
    """Show loans and borrowers, entitlements that wait, and how promises were kept."""
    found = target.ask(lambda client: client.get_elastic())
    show.emit(output, found, lambda: _print_elastic(found, one_by_one=one_by_one))


@capacity.command("buffers")
@shows_answer
def capacity_buffers(target: Target, output: str) -> None:
    """Show the spare machines that the region needs, and that owners would need separately."""
    found = target.ask(lambda client: client.get_buffers())

    def as_table() -> None:
        rows = [(b.kind, b.central, b.siloed, b.why) for b in found.buffers]
        rows.append(("together", found.central, found.siloed, f"{found.used} machines in use"))
        show.table(("buffer", "central", "by owner", "why"), rows)
        click.echo(f"\ncentral buffers leave {100 * found.gain:.1f} percentage points more in use")

    show.emit(output, found, as_table)


@capacity.command("signal")
@click.argument("entitlement")
@shows_answer
def capacity_signal(target: Target, entitlement: str, output: str) -> None:
    """Show the capacity of a borrower against its request: full, short or absent."""
    found = target.ask(lambda client: client.get_signal(entitlement))
    rows = [
        ("state", found.state),
        ("on loan", found.machines),
        ("also wanted", found.wanted),
        ("called back", found.leaving),
        ("next to return", _until(found.next_deadline)),
    ]
    show.emit(
        output, found, lambda: show.table(("what", "value"), [("entitlement", entitlement), *rows])
    )


def _until(deadline: float | None) -> str:
    return "-" if deadline is None else f"in {show.duration(max(0.0, deadline - time.time()))}"


def _whose(loan: LoanView) -> str:
    return loan.donor or (f"(free pool, of {loan.left_by})" if loan.left_by else "(free pool)")


def _print_elastic(found: ElasticReport, *, one_by_one: bool) -> None:
    if one_by_one:
        _print_loans(found.loans)
        return
    if found.holding:
        show.lines(f"lending is off: {found.holding}")
    click.echo(
        f"mode {found.mode}: {len(found.loans)} machines on loan, {found.free} free,"
        f" {found.kept} of them kept, the last matching found {found.proposed}"
    )
    _print_pools(found.pools)
    click.echo()
    _print_promises(found.promises)
    if found.freed:
        click.echo()
        rows = [(f.job, f.entitlement, f.machine_hours) for f in found.freed[:_FREED_SHOWN]]
        show.table(("autoscaled job", "entitlement", "freed machine-hours"), rows)
    for machine in found.late:
        click.echo(
            f"\nlate: {show.printable(machine)} has not been returned, and its promise has expired"
        )


def _print_loans(loans: Iterable[LoanView]) -> None:
    rows = [
        (
            *(v.machine, _whose(v), v.borrower, f"{v.promise_s:g} s", v.tasks),
            "recalled: " + v.why if v.revoked_at else "on loan",
        )
        for v in loans
    ]
    show.table(("machine", "donor", "borrower", "promise", "tasks", "state"), rows)


def _print_pools(pools: Iterable[PoolElasticity]) -> None:
    rows = [
        (
            *(p.entitlement, p.used, p.expected, p.lent, p.left, p.borrowed, p.wanted, p.short),
            "-" if p.availability is None else f"{p.availability:.1%}",
            p.freed_machine_hours,
        )
        for p in pools
    ]
    columns = ("used", "expected", "lent", "left", "borrowed", "wants", "short")
    show.table(("entitlement", *columns, "availability", "freed machine-hours"), rows)


def _print_promises(promises: Iterable[PromiseReport]) -> None:
    rows = [
        (
            *(f"{p.promise_s:g} s", p.ended, p.revoked, p.broken, p.interrupted),
            *(f"{p.mean_notice_s:g}", f"{p.return_p50_s:g}", f"{p.return_p99_s:g}"),
            p.machine_hours,
        )
        for p in promises
    ]
    ends = ("promise", "ended", "revoked", "broken", "interrupted")
    show.table((*ends, "mean notice s", "back p50 s", "back p99 s", "machine-hours"), rows)


def _print(found: CapacityReport, by: str | None) -> None:
    if by is None:
        _print_whole(found)
    elif by == "power":
        _print_power(found.power)
    elif by in _MACHINES_OF:
        _print_places(by, getattr(found, _MACHINES_OF[by]))
    else:
        _print_owners(by, found.units if by == "unit" else found.entitlements)


def _print_owners(by: str, lines: Iterable[Line]) -> None:
    rows = [
        (
            line.name or "(all)",
            line.granted_machines,
            f"{line.granted_rru:g}",
            line.held.machines,
            f"{line.held.rru:g}",
            show.share(line.used.rru, line.held.rru),
            about_size(line.held.memory_bytes),
            show.share(line.used.memory_bytes, line.held.memory_bytes),
        )
        for line in lines
    ]
    granted = ("granted", "granted rru")
    held = ("held", "held rru", "used rru", "held memory", "used memory")
    show.table((by, *granted, *held), rows)


def _print_places(by: str, lines: Iterable[Line]) -> None:
    rows = [
        (
            line.name,
            line.all.machines,
            line.held.machines,
            line.free.machines,
            f"{line.free.rru:g}",
            about_size(line.free.memory_bytes),
            show.share(line.used.rru, line.held.rru),
            show.share(line.used.memory_bytes, line.held.memory_bytes),
            f"{line.held.power_w / 1000:.1f}/{line.all.power_w / 1000:.1f}",
        )
        for line in lines
    ]
    free = ("free", "free rru", "free memory")
    used = ("used rru", "used memory", "kW held/all")
    show.table((by, "machines", "held", *free, *used), rows)


def _print_power(budgets: Iterable[PowerBudget]) -> None:
    rows = [
        (b.place, b.budget_w, b.limit_w, b.used_w, show.share(b.used_w, b.budget_w))
        for b in budgets
    ]
    show.table(("place", "budget W", "limit W", "in use W", "of budget"), rows)


def _print_whole(found: CapacityReport) -> None:
    split = found.split
    rows = [
        _row("all machines", split.all, split.all),
        _row("guaranteed: held, with tasks", split.guaranteed, split.all),
        _row("opportunistic: lent", split.lent, split.all),
        _row("opportunistic: held, no tasks", split.idle, split.all),
        _row("opportunistic: unused quota", split.unused_quota, split.all),
        _row("opportunistic: buffer", split.buffer, split.all),
        _row("down or leaving", split.unusable, split.all),
    ]
    show.table(("capacity", "machines", "rru", "share", "memory"), rows)
    click.echo()
    _print_fragmentation(found.fragmentation)
    for words in found.short:
        click.echo(f"\nshort: {show.printable(words)}")


def _print_fragmentation(pieces: Fragmentation) -> None:
    small = f"{pieces.small} of {pieces.entitlements} ({pieces.small_share:.0%})"
    rows: list[tuple[str, object]] = [
        ("entitlements of 10 machines at most", small),
        ("machines that they hold", pieces.small_held),
        ("machines held, less than half used", f"{pieces.half_empty} of {pieces.held}"),
        ("machines held, without tasks", pieces.idle),
        ("machines saved if small ones stack", pieces.stacks_save),
        ("stranded RRU", f"{pieces.stranded_rru:g}"),
        ("stranded memory", about_size(pieces.stranded_memory_bytes)),
    ]
    for task in pieces.largest:
        room = f"{about_size(task.memory_bytes)}, {task.rru:g} RRU"
        rows.append((f"largest task on {task.machine_type}", room))
    show.table(("fragmentation", "value"), rows)
    for stack in pieces.stacks:
        names = show.printable(", ".join(stack.entitlements))
        click.echo(
            f"\nstack: {names} hold {stack.held} machines with profile {stack.host_profile};"
            f" as reservations on one materialization they need {stack.needed}"
        )


def _row(name: str, part: Amount, whole: Amount) -> tuple[object, ...]:
    share = show.share(part.rru, whole.rru)
    return name, part.machines, f"{part.rru:g}", share, about_size(part.memory_bytes)
