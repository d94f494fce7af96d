"""`twinectl job plan` and `twinectl job explain`: what a change would do, and why tasks wait."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from agent.api.relaxations import TO_BE_ALLOWED
from control_plane.api.jobs import JobSpec
from control_plane.api.plans import JobExplanation, JobPlan, SpreadBin
from control_plane.cli import show
from control_plane.cli.images import names_of
from control_plane.cli.job_specs import changed_fields, differences
from control_plane.cli.jobfile import read_job
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, shows_answer
from wire.errors import NotFound

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_MOST_ROWS = 50
"""Tasks that are listed one by one; -o json has all."""
_RESULT = "this is the result of the update; its batches, canaries and waits are not simulated"
_IN_TURN = "an update chooses machines task by task, so moved tasks may get other ones than these"


@job.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Override the file.")
@shows_answer
def plan(target: Target, file: Path, settings: tuple[str, ...], output: str) -> None:
    """Show what applying FILE would place, move, restart and stop; change nothing."""
    spec = read_job(file, settings, lambda: names_of(target))

    async def work(client: ControlPlaneClient) -> tuple[JobPlan, JobSpec | None]:
        made = await client.plan_job(spec)
        try:
            return made, (await client.get_job(spec.name)).record.spec
        except NotFound:
            return made, None

    found, before = target.ask(work)
    show.emit(output, _as_json(found, spec, before), lambda: _print_plan(found, spec, before))


@job.command()
@click.argument("name")
@shows_answer
def explain(target: Target, name: str, output: str) -> None:
    """Show how many tasks of a job have a machine, and every reason why others wait."""
    target.show(output, lambda client: client.explain_job(name), _print_explanation)


def print_placed(found: JobPlan) -> None:
    """Print a line for each task that would get a machine; only some of very many."""
    rows = [
        (
            task.task,
            task.machine,
            task.datacenter,
            task.msb,
            f"moved from {task.moved_from}" if task.moved_from else "new",
            "free pool" if task.taken else "entitlement",
        )
        for task in found.placed[:_MOST_ROWS]
    ]
    if rows:
        show.table(("task", "machine", "datacenter", "msb", "what", "machine from"), rows)
    if len(found.placed) > _MOST_ROWS:
        click.echo(f"… and {len(found.placed) - _MOST_ROWS} more (-o json shows all)")


def print_outcome(found: JobPlan) -> None:
    """Print how the tasks would be spread, and why some would have no machine."""
    _print_spread(found.spread)
    for reason in found.reasons:
        show.lines(f"  no room: {reason}")


def _as_json(found: JobPlan, spec: JobSpec, before: JobSpec | None) -> dict[str, Any]:
    """Return a plan with the fields that change; `changed` is None for a new job."""
    after = replace(spec, tasks=found.wanted)
    changed = None if before is None else changed_fields(before, after)
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document | {"changed": changed}


def _print_plan(found: JobPlan, spec: JobSpec, before: JobSpec | None) -> None:
    after = replace(spec, tasks=found.wanted)
    changed = differences(before, after) if before is not None else []
    what = f"{some(len(changed), 'field')} changed:" if changed else "no change"
    click.echo(f"job {found.job}: {what if before is not None else 'new'}")
    for line in changed:
        show.lines(f"  {line}")
    if found.wanted != spec.tasks:
        click.echo(
            f"  tasks stay {found.wanted}, not {spec.tasks} as in the file: the size has another "
            f"writer or bounds of its own (twinectl job intents {found.job})"
        )
    print_placed(found)
    restarted = found.staying if found.new_version else 0
    click.echo(
        f"job {found.job}: {some(found.wanted, 'task')}: {len(found.placed)} placed,"
        f" {found.staying} stay where they are"
        + (f" ({restarted} restarted in place)" if restarted else "")
        + f", {len(found.stopped)} stopped, {len(found.unplaced)} without room;"
        f" {some(len(found.taken), 'machine')} taken from the free pool"
    )
    if found.new_version and (found.placed or found.staying or found.stopped):
        click.echo(_RESULT)
    if found.new_version and any(task.moved_from for task in found.placed):
        click.echo(_IN_TURN)
    print_outcome(found)
    click.echo(_exposure(found))
    click.echo("nothing was changed; `twinectl job apply` does it")


def _print_explanation(found: JobExplanation) -> None:
    count = f"{found.placed} of {found.wanted} placed"
    if not found.waiting:
        click.echo(f"job {found.job}: {count}")
        return _print_notes(found)
    word = "waits" if len(found.waiting) == 1 else "wait"
    click.echo(f"job {found.job}: {count}; {len(found.waiting)} {word}:")
    for reason in found.reasons:
        show.lines(f"  {reason}")
    click.echo(
        f"room for one more task now: {found.fitting_held} machines of the entitlement,"
        f" {found.fitting_free} free ones"
    )
    return _print_notes(found)


def _print_notes(found: JobExplanation) -> None:
    _print_spread(found.spread)
    shown = [*_some_of(found.volumes), *_some_of(found.operations)]
    sandbox = _exposure(found) if found.relaxations else ""
    notes = (found.image, found.uneven, *found.second_copies, found.update, found.controller)
    show.lines(*filter(None, (*notes, sandbox, *shown)))


def _exposure(found: JobPlan | JobExplanation) -> str:
    """Return what a job's tasks may do beyond their sandbox, and the resulting exposure."""
    if not found.relaxations:
        return f"sandbox of its tasks: exposure {found.exposure} of 10, no relaxations"
    words = (
        f"sandbox of its tasks: exposure {found.exposure} of 10, {found.exposure_default} without"
        f" its relaxations: {', '.join(found.relaxations)}"
    )
    raw = "; `raw` requires the role host-admin" if "raw" in found.relaxations else ""
    allowed = " and ".join(f"`{name}`" for name in TO_BE_ALLOWED if name in found.relaxations)
    return words + raw + (f"; its entitlement has to allow {allowed}" if allowed else "")


def _some_of(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_ROWS
    return [*lines[:_MOST_ROWS], *([f"… and {more} more (-o json shows all)"] if more > 0 else [])]


def _print_spread(spread: Iterable[SpreadBin]) -> None:
    bins = [f"{b.datacenter}/{b.msb} {b.tasks}" for b in spread]
    if bins:
        show.lines(f"tasks per MSB: {', '.join(bins)}")


def some(count: int, what: str) -> str:
    """Return `1 task`, `2 tasks`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
