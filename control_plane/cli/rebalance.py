"""`twinectl rebalance`: planned moves and their reasons, moves under way, and the pause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from control_plane.api.rebalancing import (
    MoveExplanation,
    MoveView,
    PauseRequest,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
    SwapView,
)
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from control_plane.cli.show import output_option
from control_plane.rebalancer.core.language import (
    PlacementAnswer,
    describe_model,
    read_model,
    toml_of,
)
from wire.errors import InvalidInput
from wire.quantity_fields import TEXT_ENCODING

_SHOWN = 20
_COLUMNS = ("move", "task", "from", "to", "relieves", "gain", "price", "state")


@click.group()
def rebalance() -> None:
    """Better placement of tasks: plans, moves, and a pause."""


@rebalance.command("plan")
@click.option("--all", "every", is_flag=True, help="Show all moves.")
@show.output_choice("svg", text="svg: use of each MSB and row before and after.")
@click.pass_obj
def rebalance_plan(target: Target, every: bool, output: str) -> None:
    """Show the moves that the ReBalancer would make now, and their gain; nothing moves."""
    found = target.ask(lambda client: client.plan_rebalance())
    if output == "svg":
        from control_plane.cli.rebalance_picture import picture

        click.echo(picture(found), nl=False)
        return
    show.emit(output, found, lambda: _print_plan(found, every))


@rebalance.command("status")
@shows_answer
def rebalance_status(target: Target, output: str) -> None:
    """Show the state of the ReBalancer."""
    target.show(output, lambda client: client.rebalance_status(), _print_status)


@rebalance.command("pause")
@click.option("--reason", required=True, help="Shown with the pause.")
@shows_answer
def rebalance_pause(target: Target, reason: str, output: str) -> None:
    """Pause the ReBalancer: it begins no moves until `resume`, also after a restart."""
    request = PauseRequest(reason=reason)
    target.show(output, lambda client: client.pause_rebalance(request), _print_status)


@rebalance.command("resume")
@shows_answer
def rebalance_resume(target: Target, output: str) -> None:
    """Resume the ReBalancer."""
    target.show(output, lambda client: client.resume_rebalance(), _print_status)


@rebalance.command("history")
@shows_answer
def rebalance_history(target: Target, output: str) -> None:
    """Show the ended moves, the newest first."""
    target.show(output, lambda client: client.rebalance_history(), _print_history)


@rebalance.command("explain")
@click.argument("move", default="model")
@click.option(
    "--model",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Describe a TOML file as text, without a call to the region.",
)
@show.output_choice("toml", text="toml: the model, for `solve`.")
@click.pass_obj
def rebalance_explain(target: Target, move: str, file: Path | None, output: str) -> None:
    """Show why MOVE is made, its gain and cost, and its progress.

    Without MOVE: the present model as text, with objects, containers, constraints and goals.
    """
    if file is not None:
        model = read_model(file.read_text(TEXT_ENCODING, errors="replace"))
        found = MoveExplanation(lines=describe_model(model), model="\n".join(toml_of(model)))
    else:
        found = target.ask(lambda client: client.explain_rebalance(move))
    if output == "toml":
        click.echo(found.model, nl=False)
        return
    show.emit(output, found, lambda: show.lines(*found.lines))


@rebalance.command("solve")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=20.0, show_default=True)
@output_option
def rebalance_solve(file: Path, seconds: float, output: str) -> None:
    """Solve a model of a TOML FILE here, and show where its objects should be.

    The region is not called and nothing moves: try other weights and machines.
    """
    # errors come before a process starts
    model = read_model(file.read_text(TEXT_ENCODING, errors="replace"))
    if not model.objects or not model.containers:
        raise InvalidInput(
            f"{file} cannot be solved: it has no {'containers' if model.objects else 'objects'}",
            hint="docs/rebalancing.md",
        )
    from control_plane.rebalancer.solver import solved_file

    found = asyncio.run(solved_file(file, seconds))
    show.emit(output, found, lambda: show.lines(*_solution(found)))


def _solution(found: PlacementAnswer) -> Iterator[str]:
    for name, at, to in found.moves:
        yield f"{name}: {at} -> {to}"
    bound = "not known" if found.bound is None else f"{found.bound:.6g}"
    best = ", which is the best" if found.is_optimal else ""
    yield (
        f"{len(found.moves)} moves: goals {found.before:.6g} -> {found.after:.6g}{best};"
        f" bound {bound}; {found.took_s:.1f} s"
    )


def _print_plan(plan: RebalancePlan, every: bool = False) -> None:
    rows = [(g.goal, f"{g.before:.3f}", f"{g.after:.3f}") for g in plan.goals]
    show.table(("goal (less is better)", "before", "after"), rows)
    bound = "not known" if plan.bound is None else f"{plan.bound:.3f}"
    click.echo(
        f"{len(plan.moves)} moves gain {plan.gain:.3f} and cost {plan.price:.3f}; lower bound of "
        f"all plans: {bound}; hot machines: {plan.hot_before} -> {plan.hot_after}"
    )
    click.echo(
        f"{plan.tasks} tasks on {plan.machines} machines, {plan.movable} may move,"
        f" {plan.measured} measured; solved in {show.duration(plan.took_s)}"
        + ("" if plan.is_complete else ", and there is more to gain")
    )
    if plan.oldest_load_s is not None:
        click.echo(f"oldest measurement: {show.duration(plan.oldest_load_s)} old")
    if plan.used:
        _print_used(plan)
    if plan.power:
        _print_power(plan)
    _print_swaps(plan.swaps)
    for stack in plan.stacks:
        names = ", ".join(stack.entitlements)
        click.echo(
            f"proposal: stack {names} on the machines of {stack.on}:"
            f" {stack.machines} machines less (twinectl entitlement request)"
        )
    _print_moves(plan.moves if every else plan.moves[:_SHOWN])
    if not every and len(plan.moves) > _SHOWN:
        click.echo(f"{len(plan.moves) - _SHOWN} more: --all")


def _print_used(plan: RebalancePlan) -> None:
    rows = [
        (name, *(f"{share:.0%}" for share in shares.values()))
        for name, shares in sorted(plan.used.items(), key=lambda each: -max(each[1].values()))
    ]
    dimensions = next(iter(plan.used.values()))
    show.table(("used of", *dimensions), rows[:_SHOWN])


def _print_power(plan: RebalancePlan) -> None:
    rows = [
        (p.place, *(f"{w:.0f}" for w in (p.before_w, p.after_w, p.limit_w))) for p in plan.power
    ]
    show.table(("power of", "watts before", "after", "costs from"), rows)
    click.echo(f"{plan.watts_measured} machines report their power draw; the others are modelled")


def _print_status(status: RebalanceStatus) -> None:
    show.lines(f"mode {status.mode}: {_state(status)}")
    click.echo(f"moves: {status.done} done, {status.withdrawn} withdrawn, {status.failed} failed")
    if status.error:
        show.lines(f"no plan: {status.error}")
    _print_swaps(status.swaps)
    if status.plan is not None:
        _print_plan(status.plan)


def _state(status: RebalanceStatus) -> str:
    if status.paused:
        return f"paused by {status.paused_by}: {status.paused_why}"
    if status.holding:
        return f"held: {status.holding}"
    if status.next_plan_s is None:
        return "plans only when asked"
    return f"next plan in {show.duration(status.next_plan_s)}"


def _print_history(found: RebalanceHistory) -> None:
    _print_swaps(found.swaps)
    _print_moves(found.moves)
    if not (found.swaps or found.moves):
        click.echo("no move or exchange has ended yet")


def _print_swaps(swaps: Sequence[SwapView]) -> None:
    rows = [
        (
            *(swap.id, swap.one, swap.two, swap.why, f"{swap.gain:.3f}", f"{swap.price:.3f}"),
            f"{swap.state.value}: {swap.reason}" if swap.reason else swap.state.value,
        )
        for swap in swaps
    ]
    if rows:
        show.table(("exchange", "machine", "with", "why", "gain", "price", "state"), rows)


def _print_moves(moves: Sequence[MoveView]) -> None:
    rows = [
        (
            move.id,
            f"{move.job}-{move.task}",
            move.from_machine,
            move.to_machine,
            move.why,
            f"{move.gain:.3f}",
            f"{move.price:.3f}",
            f"{move.state.value}: {move.reason}" if move.reason else move.state.value,
        )
        for move in moves
    ]
    if rows:
        show.table(_COLUMNS, rows)
