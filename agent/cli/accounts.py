"""Commands that inspect and clean up the objects on the host: gc and fsck."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent.api.accounts import Account, Accounts
from agent.cli import show
from agent.cli.program import call
from agent.cli.show import output_option
from wire.units import about_size


@click.command()
@click.option(
    "--explain", is_flag=True, help="Only show every object, and why it is kept or removed."
)
@output_option
@click.pass_obj
def gc(config_path: Path | None, explain: bool, output: str) -> None:
    """Remove unused images, and layers that no image uses.

    The agent also does this every ten minutes.
    """
    if explain:
        report = call(config_path, lambda c: c.get_accounts())
        return show.json(report) if output == "json" else _print_accounts(report.accounts)
    done = call(config_path, lambda c: c.collect_garbage())
    return show.json(done) if output == "json" else _print_lines(done, "nothing to remove")


@click.command()
@click.option("--repair", is_flag=True, help="Remove objects without an owner.")
@output_option
@click.pass_obj
def fsck(config_path: Path | None, repair: bool, output: str) -> None:
    """Check that units, roots, images, layers, namespaces, links, mounts and records agree.

    The exit code is 1 if they do not; with --repair, if a fault remains.
    """
    if repair:
        report = call(config_path, lambda c: c.repair_accounts())
    else:
        all_ = call(config_path, lambda c: c.get_accounts())
        report = Accounts(accounts=[a for a in all_.accounts if a.wrong])
    if output == "json":
        show.json(report)
    elif report.accounts:
        _print_lines(report, "")
        _print_accounts(report.accounts)
    else:
        _print_lines(report, "all is accounted for")
    if report.accounts:
        sys.exit(1)


def _print_lines(report: Accounts, otherwise: str) -> None:
    for line in report.done or [otherwise]:
        if line:
            click.echo(show.printable(line))


def _print_accounts(accounts: list[Account]) -> None:
    rows = [
        (
            a.kind,
            a.name,
            a.owner or "none",
            "WRONG" if a.wrong else "stays" if a.stays else "goes",
            "-" if a.bytes is None else about_size(a.bytes),
            a.why,
        )
        for a in accounts
    ]
    show.table(("KIND", "NAME", "OWNER", "FATE", "ALONE", "WHY"), rows)
