"""Commands about the host: its facts, its events, its profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent import api
from agent.cli import show
from agent.cli.program import call
from agent.cli.show import output_option
from wire.units import SIZE, about_size, quantity_of

if TYPE_CHECKING:
    from agent.client import AgentClient


@click.command()
@output_option
@click.pass_obj
def facts(config_path: Path | None, output: str) -> None:
    """Show the facts of this machine."""
    machine = call(config_path, lambda c: c.get_machine())
    rows = [(k, _fact(k, v)) for k, v in msgspec.to_builtins(machine).items()]
    show.listing(output, machine, ("FACT", "VALUE"), rows)


def _fact(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ("; " if name == "problems" else ", ").join(value)
    return about_size(value) if quantity_of(name) is SIZE else str(value)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@output_option
@click.pass_obj
def events(config_path: Path | None, follow: bool, output: str) -> None:
    """Show the events of this machine, oldest first.

    The agent keeps its last 4,096 events in memory; the journal has them all.
    With -o json each is one line.
    """

    async def read(client: AgentClient) -> None:
        page = await client.get_events(await _oldest(client))
        printed: dict[str, str] = {}
        while True:
            for event in page.events:
                _print_event(event, output, printed)
            if not follow:
                return
            page = await client.get_events(page.latest, wait_s=30)

    call(config_path, read)


async def _oldest(client: AgentClient) -> int:
    """Return the number before the first stored event."""
    latest = (await client.get_events(0)).latest
    low, high = 0, latest
    while low < high:
        middle = (low + high) // 2
        if (await client.get_events(middle)).lost:
            low = middle + 1
        else:
            high = middle
    return low


def _print_event(event: api.Event, output: str, printed: dict[str, str]) -> None:
    """Print an event. As text it is skipped if `printed` has the same message for its object.

    Some events differ only in fields that the message does not contain.
    """
    what = f"{event.kind} {event.object}".rstrip()
    if output == "json":
        click.echo(msgspec.json.encode(event))
    elif printed.get(what) != event.message:
        line = what + f": {event.message}".rstrip(": ")
        click.echo(f"{show.when(event.at)}  {show.printable(line)}")
    printed[what] = event.message
    sys.stdout.flush()


@click.command()
@output_option
@click.pass_obj
def profile(config_path: Path | None, output: str) -> None:
    """Show the host profile and its settings."""
    status = call(config_path, lambda c: c.get_profile())
    if output == "json":
        return show.json(status)
    click.echo(f"{status.name or '(none)'}: {status.state}. {status.detail}".rstrip(". "))
    rows = [(s.setting, str(s.outcome), s.wanted, s.actual) for s in status.settings]
    return show.table(("SETTING", "OUTCOME", "WANTED", "ACTUAL"), rows) if rows else None
