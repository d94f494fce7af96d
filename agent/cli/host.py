"""Commands about the host: what it has, its images."""

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
from agent.errors import InvalidInput, NotFound
from agent.wire.quantities import SIZE, about_size, quantity_of

if TYPE_CHECKING:
    from agent.client import AgentClient


@click.command()
@output_option
@click.pass_obj
def facts(config_path: Path | None, output: str) -> None:
    """Show what this machine has."""
    found = call(config_path, lambda c: c.get_machine())
    if output == "json":
        return show.json(found)
    return show.table(
        ("FACT", "VALUE"), [(k, _fact(k, v)) for k, v in msgspec.to_builtins(found).items()]
    )


def _fact(name: str, value: Any) -> str:
    return about_size(value) if quantity_of(name) is SIZE else str(value)


@click.command()
@output_option
@click.pass_obj
def images(config_path: Path | None, output: str) -> None:
    """Show the images on this machine."""
    found = call(config_path, lambda c: c.list_images())
    if output == "json":
        return show.json(found)
    rows = [
        (i.digest, str(i.format), about_size(i.stream_bytes), ", ".join(i.tasks) or "-")
        for i in found.images
    ]
    return show.table(("IMAGE", "FORMAT", "SIZE", "TASKS"), rows)


@click.group()
def image() -> None:
    """Remove images of this machine."""


@image.command("rm")
@click.argument("digest")
@click.pass_obj
def image_rm(config_path: Path | None, digest: str) -> None:
    """Remove the image DIGEST (or its first digits) that no task runs from."""

    async def remove(client: AgentClient) -> str:
        held = [i.digest for i in (await client.list_images()).images]
        found = [d for d in held if d.removeprefix("sha256:").startswith(_digits(digest))]
        if len(found) > 1:
            raise InvalidInput(
                f"{digest} is the beginning of {len(found)} images",
                hint="give more digits: " + ", ".join(found[:3]),
            )
        if not found:
            raise NotFound(f"there is no image {digest} on this machine", hint="twine-agent images")
        await client.delete_image(found[0])
        return found[0]

    click.echo(f"{call(config_path, remove)}: removed")


def _digits(digest: str) -> str:
    digits = digest.removeprefix("sha256:")
    if len(digits) < 4 or set(digits) - set("0123456789abcdef"):
        raise InvalidInput(f"{digest!r} is no digest", hint="sha256:… or 4 of its digits or more")
    return digits


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@output_option
@click.pass_obj
def events(config_path: Path | None, follow: bool, output: str) -> None:
    """Show what happened on this machine, oldest first.

    Events are kept in memory, the last 4,096 since the agent started; the journal has them all.
    """

    async def read(client: AgentClient) -> None:
        found = await client.get_events(await _oldest(client))
        while True:
            for event in found.events:
                _print_event(event, output)
            if not follow:
                return
            found = await client.get_events(found.latest, wait_s=30)

    call(config_path, read)


async def _oldest(client: AgentClient) -> int:
    """Return the number before the first event that is kept."""
    latest = (await client.get_events(0)).latest
    low, high = 0, latest
    while low < high:
        middle = (low + high) // 2
        if (await client.get_events(middle)).lost:
            low = middle + 1
        else:
            high = middle
    return low


def _print_event(event: api.Event, output: str) -> None:
    if output == "json":
        click.echo(msgspec.json.encode(event))
    else:
        said = show.printable(f"{event.kind} {event.object}: {event.message}")
        click.echo(f"{show.when(event.at)}  {said}")
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
