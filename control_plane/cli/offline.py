"""`twinectl plan --offline`: where jobs would run on machines of a list, with no control plane."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.entitlement_rules import entitlement_relations
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import MachineRecord
from control_plane.api.plans import JobPlan, PlannedTask, SpreadBin
from control_plane.api.settings import PowerSettings, SchedulerSettings
from control_plane.cli import show
from control_plane.cli.jobfile import read_document, read_job
from control_plane.cli.plans import print_outcome, print_placed, some
from control_plane.cli.show import output_option
from wire.errors import FieldError, InvalidInput, TwineError
from wire.quantity_fields import TEXT_ENCODING, parse_quantities
from wire.routes import Relations
from wire.violations import violations

if TYPE_CHECKING:
    from control_plane.allocator.allocator import Allocator

T = TypeVar("T")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class OfflinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tasks of some jobs would be, placed in this order on empty machines."""

    machines: int
    used: int
    """Machines that get a task."""
    jobs: list[JobPlan]


@click.command("plan")
@click.option("--offline", "machines", type=_FILE, required=True, metavar="MACHINES")
@click.option("--entitlements", type=_FILE, help="TOML, YAML or JSON: a table for each name.")
@click.option("--power", type=_FILE, help="TOML, YAML or JSON: `budgets_w` and `overcommit`.")
@click.argument("files", nargs=-1, required=True, metavar="JOB…", type=_FILE)
@output_option
def plan_offline(
    machines: Path,
    entitlements: Path | None,
    power: Path | None,
    files: tuple[Path, ...],
    output: str,
) -> None:
    """Show where jobs would run on the MACHINES of a list, CSV or JSON; calls no server.

    The machines count as empty and up. Jobs are placed one after the other. An entitlement that
    --entitlements does not name may hold all machines. --power is the section `scheduler.power`
    of a control plane's configuration.
    """
    specs = read_jobs(files)
    records = read_machines(machines)
    granted = read_entitlements(entitlements) if entitlements else {}
    budgets = read_power(power) if power else PowerSettings()
    found = asyncio.run(planned(records, granted, specs, budgets))
    show.emit(output, found, lambda: _print(found))


def read_jobs(files: Sequence[Path]) -> list[JobSpec]:
    """Return the jobs of some files, or raise all their errors."""
    specs, errors, where = [], list[FieldError](), dict[str, Path]()
    for path in files:
        try:
            spec = read_job(path, (), is_image_known=False)
        except InvalidInput as e:
            listed = e.errors or (FieldError(field="(whole)", reason=str(e)),)
            errors += [FieldError(field=f"{path}: {x.field}", reason=x.reason) for x in listed]
            continue
        if spec.name in where:
            reason = f"{spec.name!r} is also the job of {where[spec.name]}"
            errors.append(FieldError(field=f"{path}: name", reason=reason))
        where.setdefault(spec.name, path)
        specs.append(spec)
    if errors:
        raise _refused("plan", "job files", errors)
    return specs


def read_machines(path: Path) -> list[MachineRecord]:
    """Return the machines of a list, or raise all its errors."""
    from control_plane.broker.core.inventory import new_record, parse_csv, parse_json

    data = path.read_bytes()
    try:
        is_json = path.suffix.lower() == ".json"
        inventory = parse_json(data) if is_json else parse_csv(data.decode(TEXT_ENCODING))
    except UnicodeDecodeError as e:
        raise InvalidInput(f"cannot read {path}: it is not UTF-8: {e}") from e
    if inventory.errors:
        raise _refused("read", str(path), inventory.errors)
    return [new_record(machine, 0.0, simulated=True) for machine in inventory.machines]


def read_entitlements(path: Path) -> dict[str, EntitlementSpec]:
    """Return the entitlements of a file by name, or raise all its errors."""

    def relations(document: Any) -> list[FieldError]:
        specs = document.items() if isinstance(document, dict) else ()
        return [error for name, spec in specs for error in entitlement_relations(spec, f"{name}.")]

    return _read(path, dict[str, EntitlementSpec], relations)


def read_power(path: Path) -> PowerSettings:
    """Return the budgets of a file, or raise all its errors."""
    return _read(path, PowerSettings, lambda _: [])


def _read(path: Path, kind: type[T], relations: Relations) -> T:
    document = parse_quantities(read_document(path), kind)
    if errors := violations(document, kind) + relations(document):
        raise _refused("read", str(path), errors)
    return msgspec.convert(document, kind)


def _refused(verb: str, what: str, errors: Sequence[FieldError]) -> InvalidInput:
    first, more = errors[0], f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return InvalidInput(
        f"cannot {verb} {what}: {first.field}: {first.reason}{more}", errors=tuple(errors)
    )


async def planned(
    machines: Sequence[MachineRecord],
    entitlements: Mapping[str, EntitlementSpec],
    specs: Iterable[JobSpec],
    power: PowerSettings | None = None,
) -> OfflinePlan:
    """Return where the jobs would be, by the allocator that a control plane uses."""
    from control_plane.allocator.standalone import allocator_of

    specs = list(specs)
    unbounded = EntitlementSpec(machines=max(len(machines), 1))
    granted = {spec.entitlement: unbounded for spec in specs} | dict(entitlements)
    settings = SchedulerSettings(power=power or PowerSettings())
    async with allocator_of(machines, granted, settings) as allocator:
        jobs = [await _placed(allocator, spec) for spec in specs]
    used = {task.machine for job in jobs for task in job.placed}
    return OfflinePlan(machines=len(machines), used=len(used), jobs=jobs)


async def _placed(allocator: Allocator, spec: JobSpec) -> JobPlan:
    held = {machine.name for machine in allocator.index.pool(spec.entitlement).machines()}
    try:
        made = await allocator.place(spec)
    except TwineError as e:
        everyone = list(range(spec.tasks))
        return JobPlan(job=spec.name, wanted=spec.tasks, unplaced=everyone, reasons=[str(e)])
    claims = list(made.claims or ())
    spread = Counter(claim.machine.place.msb for claim in claims)
    return JobPlan(
        job=spec.name,
        wanted=spec.tasks,
        placed=[
            PlannedTask(
                task=claim.task,
                machine=claim.machine.name,
                datacenter=claim.machine.place.datacenter,
                msb=claim.machine.place.msb.rpartition("/")[2],
                taken=claim.machine.name not in held,
            )
            for claim in claims
        ],
        taken=sorted({claim.machine.name for claim in claims} - held),
        unplaced=list(made.unplaced),
        reasons=list(made.reasons),
        spread=[
            SpreadBin(datacenter=path.partition("/")[0], msb=path.rpartition("/")[2], tasks=tasks)
            for path, tasks in sorted(spread.items())
        ],
    )


def _print(found: OfflinePlan) -> None:
    for job in found.jobs:
        print_placed(job)
        count = f"{len(job.placed)} of {some(job.wanted, 'task')} placed"
        machines = len({task.machine for task in job.placed})
        click.echo(f"job {job.job}: {count}, on {some(machines, 'machine')}")
        print_outcome(job)
    waiting = sum(len(job.unplaced) for job in found.jobs)
    click.echo(
        f"{found.used} of {some(found.machines, 'machine')} used, {some(waiting, 'task')} without"
        " room; no server was called and nothing changed"
    )
