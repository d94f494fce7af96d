"""What tasks wrote, printed."""

from __future__ import annotations

import codecs
import sys
from collections.abc import AsyncIterator

import click

from control_plane.cli import show


async def print_log(chunks: AsyncIterator[bytes], output: str) -> None:
    """Print a log: as it is into a pipe, harmless on a terminal, line by line as JSON."""
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
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    async for chunk in chunks:
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest
