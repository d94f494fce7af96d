"""The output of tasks: options of the commands that show it, and its printing."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from control_plane.cli import show
from control_plane.cli.program import Target, options
from wire.errors import InvalidInput
from wire.options import seconds

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

log_options = options(
    click.option("-f", "--follow", is_flag=True, help="Continue with new output."),
    click.option("--tail", type=click.IntRange(1, 100_000), help="Only the last lines."),
    click.option(
        "--since", type=seconds(), metavar="DURATION", help="Only of the last 90s, 10m, …"
    ),
    click.option("-p", "--previous", is_flag=True, help="Only of the previous run."),
)
"""The options that `show_log` takes as keyword arguments."""


def show_log(
    target: Target, job: str, index: int, output: str, *, since: float | None, **chosen: Any
) -> None:
    """Print the output of a task, as the options select; `since` is in seconds before now.

    Raises `InvalidInput` if the previous run is to be followed.
    """
    if chosen["follow"] and chosen["previous"]:
        raise InvalidInput("--follow and --previous exclude each other: the previous run has ended")
    start = None if since is None else f"{time.time() - since:.3f}"

    async def work(client: ControlPlaneClient) -> None:
        await _print_log(client.job_logs(job, index, since=start, **chosen), output)

    target.ask(work)


async def _print_log(chunks: AsyncIterator[bytes], output: str) -> None:
    """Print a log: unchanged into a pipe, with escapes on a terminal, line by line as JSON."""
    if output == "table" and not show.on_terminal():
        async for chunk in chunks:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return
    async for line in lines_of(chunks):
        if output == "json":
            click.echo(show.json_text({"line": line}).replace("\n", ""))
        else:
            click.echo("\t".join(show.printable(part) for part in line.split("\t")))


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines of a log, without their ends; bytes that are no UTF-8 are replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    async for chunk in chunks:
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest
