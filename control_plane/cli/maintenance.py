"""`twinectl maintenance`: work on machines, judged before it is accepted and done in waves."""

from __future__ import annotations

import time
from typing import Any

import click

from control_plane.api.maintenance import (
    Ends,
    GoOn,
    MaintenanceRequest,
    PlanView,
    Preview,
    Reported,
    Within,
    Work,
)
from control_plane.cli import show
from control_plane.cli.machines import chosen, duration_option, scope_option
from control_plane.cli.program import Target, options, shows_answer
from control_plane.cli.show import output_option
from wire.options import seconds

_READY_SHOWN = 20
_WORKS, _WITHINS = [w.value for w in Work], [w.value for w in Within]


@click.group()
def maintenance() -> None:
    """Work on machines: its effect, its waves, and its progress."""


_request_options = options(
    click.argument("plan"),
    click.argument("names", nargs=-1, metavar="[MACHINE]..."),
    scope_option,
    click.option("--work", type=click.Choice(_WORKS), default="repair", show_default=True),
    click.option(
        "--reason", required=True, help="Shown with the plan, its machines and their tasks."
    ),
    click.option(
        "--start", "start_in_s", type=seconds(), default="0s", help="Of the first wave, from now."
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=seconds(),
        help="From the start of a wave; overrides the durations by work.",
    ),
    duration_option,
    click.option(
        "--tasks-survive", is_flag=True, help="Tasks continue to run, but cannot be reached."
    ),
    click.option(
        "--wave-size",
        type=click.IntRange(0, 1000),
        default=0,
        help="Maximum number of machines of a wave.",
    ),
    click.option(
        "--within",
        type=click.Choice(_WITHINS),
        help="A wave stays within one of these.",
    ),
    click.option(
        "--return-within",
        "return_within_s",
        type=seconds(),
        default="1h",
        show_default=True,
        help=(
            "Time after the end of a wave within which its machines must be back, or "
            "the plan pauses."
        ),
    ),
    click.option(
        "--ends", type=click.Choice([e.value for e in Ends]), help="[default: by kind of work]"
    ),
    click.option(
        "--shed-watts",
        "shed_w",
        type=click.IntRange(min=0),
        default=0,
        help="Watts to shed, for power-cap.",
    ),
    output_option,
)
"""The options that describe the work."""


def _request(values: dict[str, Any], *, despite: bool = False) -> MaintenanceRequest:
    machines, scope = chosen(values.pop("names"), values.pop("scopes"))
    for name, kind in (("work", Work), ("within", Within), ("ends", Ends)):
        values[name] = kind(values[name]) if values[name] else None
    return MaintenanceRequest(machines=machines, scope=scope, despite=despite, **values)


@maintenance.command("plan")
@_request_options
@click.pass_obj
def maintenance_plan(target: Target, /, plan: str, output: str, **values: Any) -> None:
    """Show the effect of PLAN on jobs; nothing is announced."""
    request = _request(values)
    target.show(output, lambda client: client.preview_plan(plan, request), _print_preview)


@maintenance.command("apply")
@_request_options
@click.option("--despite", is_flag=True, help="Proceed although the preview warns.")
@click.pass_obj
def maintenance_apply(
    target: Target, /, plan: str, output: str, despite: bool, **values: Any
) -> None:
    """Announce PLAN: its waves begin one after another.

    It is refused if the preview warns, unless --despite is given; the audit log records that.
    """
    request = _request(values, despite=despite)
    target.show(output, lambda client: client.accept_plan(plan, request), _print_plan)


@maintenance.command("list")
@shows_answer
def maintenance_list(target: Target, output: str) -> None:
    """Show all plans, the newest first."""
    found = target.ask(lambda client: client.list_plans())
    rows = [
        (
            view.plan.name,
            view.plan.request.work.value,
            view.plan.state.value,
            f"{view.done}/{view.plan.machines}",
            f"{_under_way(view)}/{view.plan.waves}",
            view.plan.by,
            view.plan.detail or view.plan.request.reason,
        )
        for view in found.plans
    ]
    columns = ("plan", "work", "state", "done", "wave", "by", "reason")
    show.emit(output, found, lambda: show.table(columns, rows))


def _under_way(view: PlanView) -> str:
    return ",".join(str(wave.number) for wave in view.waves[:3]) or "-"


@maintenance.command("show")
@click.argument("plan")
@shows_answer
def maintenance_show(target: Target, plan: str, output: str) -> None:
    """Show PLAN, its waves, and the machines on which work may begin."""
    target.show(output, lambda client: client.get_plan(plan), _print_plan)


@maintenance.command("cancel")
@click.argument("plan")
@shows_answer
def maintenance_cancel(target: Target, plan: str, output: str) -> None:
    """Cancel PLAN: announced events end, and no further wave begins."""
    target.show(output, lambda client: client.cancel_plan(plan), _print_plan)


@maintenance.command("done")
@click.argument("plan")
@click.argument("names", nargs=-1, required=True, metavar="MACHINE...")
@shows_answer
def maintenance_done(target: Target, plan: str, names: tuple[str, ...], output: str) -> None:
    """Report that the work of PLAN on these machines is over."""
    request = Reported(machines=list(names))
    target.show(output, lambda client: client.report_plan(plan, request), _print_plan)


@maintenance.command("resume")
@click.argument("plan")
@click.option("--without", is_flag=True, help="Continue without the machines that are not back.")
@shows_answer
def maintenance_resume(target: Target, plan: str, without: bool, output: str) -> None:
    """Continue a paused PLAN."""
    target.show(output, lambda client: client.resume_plan(plan, GoOn(without=without)), _print_plan)


# -- output


def _print_preview(found: Preview) -> None:
    waves = f"{len(found.waves)} wave(s) of at most {max(found.waves, default=0)}"
    line = f"{found.machines} machine(s) in {waves}, {found.tasks} task(s) there"
    click.echo(f"{line}; work is over by {found.ends.value}")
    click.echo(f"at once: {found.at_once} machine(s) of the first wave, {len(found.held)} wait")
    for held in found.held[:_READY_SHOWN]:
        show.lines(f"  {held.machine} waits for {', '.join(held.jobs)}")
    rows = [
        (
            job.job,
            f"{job.there}/{job.tasks}",
            job.down,
            job.budget,
            job.rounds,
            job.controller or "-",
            job.unplaced or "-",
        )
        for job in found.jobs
    ]
    show.table(("job", "tasks there", "down", "budget", "rounds", "asks", "no place"), rows)
    for word, lines in (
        ("note", found.notes),
        ("also", found.conflicts),
        ("WARNING", found.warnings),
    ):
        for text in lines:
            show.lines(f"{word}: {text}")


def _print_plan(view: PlanView) -> None:
    plan = view.plan
    text = f"plan {plan.name}: {plan.request.work}, {plan.state}, {view.done}/{plan.machines} done"
    show.lines(text + (f"; {plan.detail}" if plan.detail else ""))
    rows = [
        (
            wave.number,
            wave.state.value,
            f"{wave.done}/{wave.machines}",
            ", ".join(f"{n} {what}" for what, n in wave.waiting.items()) or "-",
            _at(wave.start),
            _at(wave.deadline),
            " ".join(wave.ready[:_READY_SHOWN]) or "-",
        )
        for wave in view.waves
    ]
    show.table(
        ("wave", "state", "done", "wait for", "start", "deadline", "work may begin on"), rows
    )


def _at(moment: float | None) -> str:
    return "-" if moment is None else time.strftime("%m-%d %H:%M:%SZ", time.gmtime(moment))
