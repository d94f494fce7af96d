"""`twinectl limit`: what holds back what destroys, and lifting it for a while."""

from __future__ import annotations

import click

from control_plane.api.limits import Lift, LimitName, LimitView, LimitViews
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option
from wire.options import seconds


@click.group()
def limit() -> None:
    """Limits on what stops, moves, takes away or deletes."""


@limit.command("list")
@output_option
@click.pass_obj
def limit_list(target: Target, output: str) -> None:
    """Show all limits, what passed them, and what they hold back and why."""
    found: LimitViews = target.ask(lambda client: client.list_limits())
    columns = ("limit", "per s", "at once", "passed", "held", "refused", "why, or who lifted it")
    rows = [_row(view) for view in found.limits]
    show.emit(output, found, lambda: show.table(columns, rows))


def _row(view: LimitView) -> tuple[object, ...]:
    why = view.reason or "-"
    if view.lifted_for_s is not None:
        left = show.duration(view.lifted_for_s)
        why = f"lifted by {view.lifted_by} for {left} more: {view.lifted_why}"
    rate = f"{view.per_s:g}"
    return (view.name.value, rate, view.burst, view.passed, view.held, view.refused, why)


@limit.command("lift")
@click.argument("name", type=click.Choice([name.value for name in LimitName]))
@click.option("--for", "for_s", type=seconds(), default="10m", show_default=True, help="How long.")
@click.option("--reason", required=True, help="Kept in the audit log.")
@output_option
@click.pass_obj
def limit_lift(target: Target, name: str, for_s: float, reason: str, output: str) -> None:
    """Let everything pass limit NAME for a while; --for 0s has it hold again."""
    wish = Lift(for_s=for_s, reason=reason)
    found: LimitView = target.ask(lambda client: client.lift_limit(name, wish))
    text = f"limit {name}: lifted for {show.duration(found.lifted_for_s)}"
    text = text if found.lifted_for_s else f"limit {name} holds"
    show.emit(output, found, lambda: click.echo(show.printable(text)))
