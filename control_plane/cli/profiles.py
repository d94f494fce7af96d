"""`twinectl profile`: the host profile of an entitlement, changed while its jobs run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from control_plane.api.profiles import TEXT_MAX, ProfileProposal, ProfileView
from control_plane.cli import show
from control_plane.cli.jobfile import read_bytes
from control_plane.cli.program import Target, shows_answer
from wire.errors import InvalidInput
from wire.options import seconds
from wire.quantity_fields import TEXT_ENCODING


@click.group()
def profile() -> None:
    """Change the host profile of an entitlement while its jobs run."""


@profile.command()
@click.argument("entitlement")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Shown with the change.")
@click.option("--at-once", type=click.IntRange(1, 1000), default=1, show_default=True,
              help="Number of machines that are changed together.")  # fmt: skip
@click.option("--gate", "gate_s", type=seconds(), default="1m", show_default=True,
              help="Time for which a machine must be healthy before the next one.")  # fmt: skip
@click.option("--failures", type=click.IntRange(1, 1000), default=1, show_default=True,
              help="Number of failed machines after which all are rolled back.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check it, but change nothing.")
@shows_answer
def propose(
    target: Target,
    entitlement: str,
    file: Path,
    dry_run: bool,
    output: str,
    **given: Any,
) -> None:
    """Roll out the profile of FILE to the machines of ENTITLEMENT, a few at a time.

    FILE is TOML, extends their present profile, and has only settings open to owners. Changes that
    need a boot, or disturb tasks, wait until the tasks have left, within the budgets of their jobs.
    """
    request = ProfileProposal(text=_read(file), **given)
    found = target.ask(lambda client: client.propose_profile(entitlement, request, dry_run=dry_run))
    if dry_run:
        show.emit(output, found, lambda: click.echo("valid, nothing changed"))
        return
    _emit(output, found)


@profile.command()
@click.argument("entitlement")
@shows_answer
def status(target: Target, entitlement: str, output: str) -> None:
    """Show the profile of ENTITLEMENT's machines, and the progress of a change."""
    _emit(output, target.ask(lambda client: client.get_profile_rollout(entitlement)))


@profile.command()
@click.argument("entitlement")
@shows_answer
def rollback(target: Target, entitlement: str, output: str) -> None:
    """Roll the machines of ENTITLEMENT back to the profile before the last change."""
    _emit(output, target.ask(lambda client: client.rollback_profile(entitlement)))


@profile.command()
@shows_answer
def stats(target: Target, output: str) -> None:
    """Show how long the last switch of each host took, by kind of setting."""
    found = target.ask(lambda client: client.profile_stats())
    rows = [
        (row.setting, row.switches, _time(row.p50_ms), _time(row.p90_ms)) for row in found.settings
    ]
    columns = ("setting", "switches", "P50", "P90")
    show.emit(output, found, lambda: show.table(columns, rows))


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _read(file: Path) -> str:
    try:
        return read_bytes(file, TEXT_MAX).decode(TEXT_ENCODING)
    except UnicodeDecodeError as e:
        raise InvalidInput(f"{file} cannot be read: it is not UTF-8") from e


def _emit(output: str, found: ProfileView) -> None:
    def lines() -> None:
        show.lines(*_head(found))
        rows = [(name, count, found.proved.get(name, 0)) for name, count in found.machines.items()]
        show.table(("profile", "machines", "proved"), rows)

    show.emit(output, found, lines)


def _head(found: ProfileView) -> list[str]:
    head = [f"entitlement {found.entitlement}: machines that join it run {found.profile}"]
    rollout = found.rollout
    if rollout is not None:
        head.append(f"  {rollout.base} → {rollout.name}: {rollout.state}, {rollout.reason}")
        if rollout.failed:
            head.append(f"  failed on {', '.join(rollout.failed[:10])}")
    return [*head, *(f"  {line}" for line in found.waiting[:10])]
